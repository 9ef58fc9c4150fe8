"""The command: python -m launch.logs FILE [--json] [--bound CLASS=N]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import launch.logs
from launch.logs.classes import load_classes
from launch.logs.reader import classify, read_lines
from launch.logs.report import table


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    p = argparse.ArgumentParser(
        prog="python -m launch.logs", description=launch.logs.__doc__.split("\n", 1)[0]
    )
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true", help="the report as JSON")
    p.add_argument(
        "--bound", action="append", default=[], metavar="CLASS=N", help="in place of the contract's"
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    """Return 0 clean, 1 alert, 2 usage (also argparse's code), 3 unknown warnings or errors without alert."""
    o = (p := parser()).parse_args(arguments)
    try:
        bounds = {name: int(value) for name, _, value in (b.partition("=") for b in o.bound)}
        report = classify(read_lines(o.file), load_classes(bounds=bounds))
    except (OSError, ValueError) as error:
        p.error(f"{o.file}: {error.strerror}" if isinstance(error, OSError) else str(error))
    print(json.dumps(report.to_json(), indent=1) if o.json else table(report))
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
