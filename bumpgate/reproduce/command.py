"""`bumpgate reproduce`: a red row as one file that upstream can run, proved in both environments."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bumpgate.core import gate_file
from bumpgate.core.baseline import find_root
from bumpgate.core.command_line import takes
from bumpgate.core.errors import BumpgateError, check_number
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record, write_atomic
from bumpgate.core.text import some
from bumpgate.reproduce import defect_row
from bumpgate.reproduce.issue import TRACKERS, Known, body, known_issues, package, read_bisect, title
from bumpgate.reproduce.proof import Bench, environment
from bumpgate.reproduce.reproduction import Reproduction, reproduce
from bumpgate.reproduce.standalone import load

SHOWN = 4


class ReproduceError(BumpgateError):
    """A finding without a program, or options that name none."""


@dataclass(frozen=True)
class Options:
    """Options of `bumpgate reproduce`."""

    source: Annotated[Path | None, Argument(help="gate.json, or record.json with ROW.")] = None
    row: Annotated[str, Argument(help="A row; by default the gate's worst finding that has a program.")] = ""
    program: Annotated[
        str, Option(help="FILE.py:function, or a script that ends with 0 or 1, instead of the row's.")
    ] = ""
    adopted: Annotated[str, Option(help="Interpreter of the adopted side, if it is not the gate's.")] = ""
    candidate: Annotated[str, Option(help="Interpreter of the candidate.")] = ""
    lane: Annotated[str, Option(help="The lane of --row.")] = "cpu"
    out: Annotated[Path | None, Option(help="The file to write; by default its row's name.py.")] = None
    minutes: Annotated[float, Option(help="Time limit of the reduction.")] = 10.0
    times: Annotated[int, Option(help="Proving runs in each environment.")] = 3
    issue: Annotated[
        bool, Option("--issue", help="Also write NAME.md: the issue for upstream. Nothing is sent.")
    ] = False
    as_row: Annotated[
        bool, Option("--row", help="Also write test_NAME.py: the defect row, run once on each side.")
    ] = False
    bisect: Annotated[Path | None, Option(help="bisect.json: its first bad version goes into both.")] = None
    changed: Annotated[Path | None, Option(help="Markdown about the changed code, for the issue.")] = None


@takes(Options)
def command(options: Options) -> None:
    """Write the smallest program that is right on one side and wrong on the other, proved in both.

    The same command continues an interrupted reduction.

    Exit codes: 0 written and proved; 1 not separated, the best so far is kept; 4 bad input; 125 a machine failure.
    """
    check_number("--minutes", options.minutes, 24 * 60)
    check_number("--times", options.times, 100)
    if options.times < 1:
        raise ReproduceError(f"--times {options.times}: must be at least 1")
    row, program, pythons = chosen(options)
    root = find_root(Path.cwd())
    loaded = load(root, program)
    bisected = read_bisect(options.bisect)
    changed = options.changed.read_text(encoding="utf-8") if options.changed else ""
    sides = [environment(name, Path(python)) for name, python in pythons.items()]
    target = options.out or Path(re.sub(r"\W+", "_", row or program).strip("_") + ".py")
    issue, test = target.with_suffix(".md"), target.with_name(f"test_{target.stem}.py").absolute()
    for path, sign in ((target, "125 neither."), (issue, "### 🐛 Describe"), (test, "A known defect: move")):
        if path.is_file() and sign not in path.read_text(encoding="utf-8", errors="replace"):
            raise ReproduceError(
                f"{path}: this file is no earlier output of this command: name another --out"
            )
    kept = target.with_suffix(".best.py")
    work = target.with_suffix(".work")
    with Bench(sides[0], sides[1], work) as bench:
        found = reproduce(loaded, bench, kept, 60 * options.minutes, options.times, typer.echo)
    write_atomic(target, found.text)
    kept.unlink(missing_ok=True)
    if found.whole:
        kept.with_suffix(".journal").unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    typer.echo(summary(found, target, options.times))
    name = package(found, bisected)
    if options.issue:
        _write_issue(found, issue, name, bisected, known_issues(root, found, program), changed)
    if options.as_row:
        first = str(bisected.get("first") or "") if bisected.get("package") == name else ""
        write_atomic(
            test, defect_row.text(found, row, options.lane, defect_row.known_in(found, name, first), root)
        )
        typer.echo(f"wrote {test.name}: {defect_row.check(found, root, test, options.lane)}")


def _write_issue(
    found: Reproduction, file: Path, name: str, bisected: Mapping[str, Any], known: list[Known], changed: str
) -> None:
    """Write the issue's text, and print its title and what may be the same issue."""
    write_atomic(file, f"# {title(found, name)}\n\n{body(found, name, bisected, known, changed)}")
    typer.echo(f"wrote {file}, an issue for {TRACKERS[name]}: {title(found, name)}; it is not sent")
    for one in known:
        typer.echo(f"may be known: {one.link} ({one.why})")
    if not known:
        typer.echo("no known issue has its signature; search there for its title before you send it")


def summary(found: Reproduction, target: Path, times: int) -> str:
    """Say what was written, in two lines."""
    cut = "" if found.whole else "; the time limit ended the reduction: the same command continues it"
    took = f"{found.runs} runs in {found.seconds:.0f} s{cut}"
    proved = f"{times} of {times} runs right under {found.good}, {times} of {times} wrong under {found.bad}"
    return f"proved: {proved}\nwrote {target}: {found.lines} lines, {took}"


def chosen(options: Options) -> tuple[str, str, dict[str, str]]:
    """Return the row, the place of its program, and the interpreter of each side."""
    source = gate_file.read(options.source) if options.source else None
    pythons = {"adopted": options.adopted, "candidate": options.candidate}
    row, program = options.row, options.program
    if isinstance(source, GateFile):
        pythons = {name: pythons[name] or getattr(source, name).python for name in pythons}
    if source is not None and not program:
        row, program = row_of(source, row)
    if not program:
        raise ReproduceError(
            "name what to reproduce: GATE_JSON [ROW], RECORD ROW, or --program FILE.py:function"
        )
    if missing := [name for name, python in pythons.items() if not python]:
        raise ReproduceError(f"the {missing[0]} side has no interpreter: name it with --{missing[0]} PYTHON")
    return row, program, pythons


def row_of(source: Record | GateFile, row: str) -> tuple[str, str]:
    """Return a row and the place of its program. Without a row: of the worst finding that has one."""
    records = (source.candidate.record, source.adopted.record) if isinstance(source, GateFile) else (source,)
    programs = {j.row.id: j.row.program for r in records if r for j in r.judgements if j.row.program}
    if row:
        if row in programs:
            return row, programs[row]
        known = {j.row.id for r in records if r for j in r.judgements}
        fault = "its test names no program" if row in known else "no such row"
        raise ReproduceError(f"{row}: {fault}; name one with --program FILE.py:function")
    if not isinstance(source, GateFile):
        raise ReproduceError("a record needs the ROW to reproduce")
    order = sorted(source.findings, key=lambda f: list(Decision).index(f.decision))
    shown = [name for f in order for name in f.rows if name in programs]
    if not shown:
        rows = some([name for f in order for name in f.rows], SHOWN) or "none"
        raise ReproduceError(
            f"no finding has a row with a program (rows: {rows}); name --program FILE.py:function"
        )
    return shown[0], programs[shown[0]]
