"""`bumpgate diff`: what changed in the code that two environments compile for one test."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bumpgate.core.baseline import find_root
from bumpgate.core.command_line import takes
from bumpgate.core.errors import BumpgateError, check_number, text_lines
from bumpgate.core.rows import write_output
from bumpgate.core.text import printable, redacted
from bumpgate.process import child
from bumpgate.process.host import read_or_empty
from bumpgate.process.runner import child_environment
from bumpgate.report.html_page import fill
from bumpgate.report.markdown import escape
from bumpgate.reproduce.code import KINDS, Code, Comparison, compare, read_code
from bumpgate.reproduce.proof import Environment, environment

# Lines of one change: on the page, in Markdown, on the terminal.
MOST, MARKDOWN, TERMINAL = 400, 60, 12


@dataclass(frozen=True)
class Options:
    """Options of `bumpgate diff`."""

    adopted: Annotated[Path, Argument(help="Environment, or its interpreter.")]
    candidate: Annotated[Path, Argument(help="Another one.")]
    test: Annotated[
        tuple[str, ...], Argument(help="Options and node ids of pytest, or a script and its arguments.")
    ]
    out: Annotated[Path, Option(help="Folder of diff.html, diff.md, traces and logs; replaced.")] = Path(
        "build/diff"
    )
    minutes: Annotated[float, Option(help="Time limit of each side.")] = 30.0


@takes(Options)
def command(options: Options) -> None:
    """Run one test in two environments, and show what differs in the code that they compiled.

    Both sides begin with empty caches. A test that fails is compared all the same.

    Exit codes: 0 equal; 1 differs; 4 bad input, or a test that compiles nothing.
    """
    check_number("--minutes", options.minutes, 24 * 60)
    given = {"adopted": options.adopted, "candidate": options.candidate}
    sides = [environment(n, p / "bin" / "python" if p.is_dir() else p) for n, p in given.items()]
    codes = [_run(side, options) for side in sides]
    test = " ".join(options.test)
    if not any(lines for code in codes for lines in code.kinds.values()):
        log = options.out / "candidate.log"
        said = (text_lines(read_or_empty(log)) or ["nothing printed"])[-1]
        raise BumpgateError(f"{test}: it compiled nothing on either side ({said}); see {log}")
    found = compare(*codes)
    write(options.out, found, [str(side) for side in sides], test)
    typer.echo(summary(found, sides, codes))
    typer.echo(f"\nwrote {options.out / 'diff.html'} and {options.out / 'diff.md'}")
    raise typer.Exit(bool(found.changes))


def _run(side: Environment, options: Options) -> Code:
    """Run the test in one environment, and read what it compiled."""
    place = options.out.absolute() / side.name
    names = {"TORCH_TRACE": "trace", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    if place.is_dir() and not {path.name for path in place.iterdir()} <= {*names.values()}:
        raise BumpgateError(f"{place}: this folder is no earlier output of this command: name another --out")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    first = Path(options.test[0])
    script = first.suffix == ".py" and not first.name.startswith("test_")
    variables = child_environment(side.python, None if script else find_root(Path.cwd()))
    variables |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", **{k: str(place / v) for k, v in names.items()}}
    program = [str(side.python), *([] if script else ["-m", "pytest"]), *options.test]
    log = place.with_suffix(".log")
    limit = 60 * options.minutes
    if child.ending(*child.run_child(program, Path.cwd(), variables, limit, log), limit).limit:
        raise BumpgateError(
            f"{side.name}: the test did not end within {options.minutes:g} minutes: raise --minutes"
        )
    code = read_code(place / "trace", place / "triton", side.python)
    shutil.rmtree(place / "inductor", ignore_errors=True)
    return code


def summary(found: Comparison, sides: Sequence[Environment], codes: Sequence[Code]) -> str:
    """Return one screen: the sides, how much of each kind differs, and the first difference."""
    lines = [f"{side.name:<9} {side}: {c.compilations} compilations" for side, c in zip(sides, codes)]
    for kind, (differ, count) in found.counts.items():
        first = next((change.names[0] for change in found.changes if change.kind == kind), "")
        more = f": {first[:80]}{f' and {differ - 1} more' * (differ > 1)}" if first else ""
        lines.append(f"{differ:>4} of {count} {KINDS[kind]} differ{more}")
    for change in found.changes[:1]:
        only = f" ({change.only} only)" * bool(change.only)
        lines += ["", f"first, {KINDS[change.kind]}, {change.names[0]}{only}:"]
        lines += [str(line)[:150] for line in change.lines[:TERMINAL]]
    return "\n".join(lines if found.changes else [*lines, "the code is equal"])


def write(out: Path, found: Comparison, sides: Sequence[str], test: str) -> None:
    """Write the page and the Markdown."""
    groups = [(kind, list(changes)) for kind, changes in groupby(found.changes, lambda change: change.kind)]
    page = fill(
        "code.html.j2", groups=groups, counts=found.counts, kinds=KINDS, sides=sides, test=test, most=MOST
    )
    lines = [f"## {escape(f'{sides[0]} -> {sides[1]}')}", "", f"`{test}`", "", "| kind | differ | of |"]
    lines += [
        "|---|---|---|",
        *(f"| {KINDS[kind]} | {n} | {all} |" for kind, (n, all) in found.counts.items()),
    ]
    for kind, changes in groups:
        lines += ["", f"### {KINDS[kind]}", ""]
        for change in changes:
            more = f" and {len(change.names) - 1} more" * (len(change.names) > 1)
            only = f", {change.only} only" * bool(change.only)
            diff = [str(line).replace("```", "'''") for line in change.lines]
            lines += [f"<details><summary>{escape(change.names[0])}{more}{only}</summary>", ""]
            lines += ["```diff", *diff[:MARKDOWN], "```"]
            lines += [f"{len(diff) - MARKDOWN} more lines"] * (len(diff) > MARKDOWN) + ["", "</details>"]
    write_output(out / "diff.html", redacted(page), "<!DOCTYPE html>")
    write_output(out / "diff.md", printable(redacted("\n".join(lines) + "\n")), "## ")
