"""Where a lane's time goes: python -m tools.lane_seconds ~/.cache/bumpgate/seconds/h200.json --out page.md

A lane run keeps the wall seconds of each test in that file, for its progress display; several files are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bumpgate.core.errors import BumpgateError

LONGEST = 25


def folder(test: str) -> str:
    """Return the suite of a test: "suites/kernels/test_a.py::test_b[c]" -> "suites/kernels"."""
    return test.partition("::")[0].rpartition("/")[0]


def table(runs: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """Return two Markdown tables, by suite and by test, longest first. runs: test -> seconds, a column each."""
    suites = [dict.fromkeys(map(folder, run), 0.0) for run in runs]
    for totals, run in zip(suites, runs):
        for test, seconds in run.items():
            totals[folder(test)] += seconds
    parts = [("suite", suites, len({s for one in suites for s in one})), ("test", runs, LONGEST)]
    return "\n".join(line for title, columns, most in parts for line in _lines(title, columns, names, most))


def _lines(title: str, columns: Sequence[Mapping[str, float]], names: Sequence[str], most: int) -> list[str]:
    order = sorted({key for column in columns for key in column}, key=lambda k: (-columns[-1].get(k, 0.0), k))
    lines = [f"| {title} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [
        f"| `{key}` | {' | '.join(f'{column.get(key, 0.0):.0f}' for column in columns)} |"
        for key in order[:most]
    ]
    rest = [sum(column.get(key, 0.0) for key in order[most:]) for column in columns]
    if order[most:]:
        lines.append(f"| {len(order[most:])} others | {' | '.join(f'{seconds:.0f}' for seconds in rest)} |")
    totals = (f"{sum(column.values()):.0f}" for column in columns)
    return [*lines, f"| sum | {' | '.join(totals)} |", ""]


def read(path: Path) -> dict[str, float]:
    """Return test -> seconds. Raises BumpgateError on anything else."""
    try:
        return {str(test): float(seconds) for test, seconds in json.loads(path.read_text()).items()}
    except OSError as error:
        raise BumpgateError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, AttributeError):
        raise BumpgateError(f"{path}: not a file of seconds by test") from None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("files", type=Path, nargs="+", help="files of seconds, a column each")
    options.add_argument("--out", type=Path, help="write the tables here instead of printing them")
    given = options.parse_args()
    try:
        text = table([read(path) for path in given.files], [path.stem for path in given.files])
    except BumpgateError as error:
        print(error, file=sys.stderr)
        raise SystemExit(4) from None
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
