"""Output of `bumpgate gate`: live progress on a terminal, one line per step elsewhere, the findings at the end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from bumpgate.core.errors import loads
from bumpgate.core.findings import NO_REGRESSION, Decision, Finding
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Verdict
from bumpgate.core.text import clock, printable
from bumpgate.env.freeze import without_cuda
from bumpgate.gate.materiality import variants
from bumpgate.process.home import load_durations, save_durations

STYLE = {Decision.HOLD: "bold red", Decision.UNKNOWN: "yellow", Decision.ADOPT: "green"}
SHOWN_LINES = 6
# Where the seconds of the steps of gates are kept, next to the seconds of tests.
STEPS = "steps of gates"
# Findings on rows that both sides measured: speed, memory, counts, numbers.
OF_CODE = ("REGRESSION", "CHANGED", "SLOWER", "SLOW MODE", "CREEP")
EQUAL_OUTCOMES = (*(outcome.value for outcome in NO_REGRESSION), Verdict.NEW.value)


class _Seen(ProgressColumn):
    """What a run of a lane says of itself, or the seconds of another step and those of the last time."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if run := read_progress(task.fields["run"]):
            task.completed, task.total = run["finished"], run["tests"]
            return Text(run["line"], no_wrap=True, overflow="ellipsis")
        spent, expected = task.elapsed or 0.0, task.fields["expected"]
        task.completed, task.total = min(spent, expected), expected or None
        return Text(f"{clock(spent)} of about {clock(expected)}" if expected else clock(spent))


class View:
    """Progress output on `console` (stderr), so that stdout holds only the findings.

    lane: the seconds of its steps are kept, for the estimate of the next gate.
    """

    def __init__(self, console: Console, lane: str = "") -> None:
        self.console, self.lane = console, lane

    def say(self, line: str) -> None:
        """Print one finished step."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def doing(self, what: str, runs: Mapping[str, Path | None] = {}) -> Iterator[Callable[[str], None]]:
        """Show a running step: on a terminal, a bar whose text the yielded function rewrites.

        runs: name -> the file of its progress; each has a bar of its tests.
        """
        if not self.console.is_terminal:
            yield lambda text: None
            return
        started, key = time.monotonic(), f"{self.lane}: {what}"
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(12), _Seen())
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=2) as shown:
            expected = load_durations(STEPS).get(key, 0.0)
            tasks = [
                shown.add_task(f"{name}: {what}" if name else what, total=None, run=run, expected=expected)
                for name, run in (runs or {"": None}).items()
            ]
            yield lambda text: shown.update(tasks[0], description=text)
        with suppress(OSError):
            save_durations(STEPS, {**load_durations(STEPS), key: time.monotonic() - started})


def read_progress(path: Path | None) -> dict[str, Any]:
    """Return what a run has written of its progress: finished, tests, line; empty without any."""
    try:
        raw = loads(path.read_bytes()) if path else {}
        return {"finished": int(raw["finished"]), "tests": int(raw["tests"]), "line": printable(raw["line"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def findings_text(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as unbroken lines, so that a log can be searched, and a command copied."""
    for f in findings:
        lines = [f" {f.cause}", *(f"{'':<8} row {row}" for row in cut(f.rows))]
        lines += [f"{'':<8} adopted:   {line}" for line in cut(f.adopted)]
        lines += [f"{'':<8} candidate: {line}" for line in cut(f.candidate)]
        lines += [f"{'':<8} -> {f.repro}"] if f.repro else []
        label = f"{f.decision.name:<8}", STYLE[f.decision]
        console.print(Text.assemble(label, "\n".join(lines)), soft_wrap=True)


def cut(lines: Sequence[str]) -> list[str]:
    """Return the first SHOWN_LINES lines, and the count of the others; all of them with -v."""
    if os.environ.get("BUMPGATE_VERBOSE"):
        return [*lines]
    more = len(lines) - SHOWN_LINES
    return [*lines[:SHOWN_LINES], *([f"... and {more} more in gate.json"] if more > 0 else [])]


def notes(gate: GateFile) -> list[str]:
    """Return the lines below the findings: moved packages, variants, acceptances, margins, and what is missing."""
    provenance = [s.record.provenance if s.record else {} for s in (gate.adopted, gate.candidate)]
    variant = other_variant(*(str(p.get("torch")) for p in provenance))
    return [
        *(f"moved: {line}" for line in cut(without_cuda(gate.moved))),
        *([variant] if variant else []),
        *(f"changed code: {line}" for line in cut(code_commands(gate))),
        *(f"acceptance: {line}" for line in gate.accepted),
        *(f"margin: {line}" for line in provenance[0].get("margins", ())),
        *([explained(gate)] if gate.decision is Decision.UNKNOWN else []),
    ]


def code_commands(gate: GateFile) -> list[str]:
    """Return `bumpgate diff ADOPTED CANDIDATE -- TEST` for the tests of findings that generated code may explain."""
    sides = [gate.adopted.python, gate.candidate.python]
    found = [f.repro for f in gate.findings if f.decision is Decision.HOLD and f.label in OF_CODE and f.rows]
    tests = [
        shlex.split(line)[shlex.split(line).index("pytest") + 1 :] for line in found if " pytest " in line
    ]
    lines = [shlex.join(["bumpgate", "diff", *sides, "--", *test]) for test in tests] if all(sides) else []
    return list(dict.fromkeys(lines))


def other_variant(adopted: str, candidate: str) -> str:
    """Return a note if these are different variants of torch, such as +cpu and +cu130; "" otherwise."""
    if not (labels := variants(adopted, candidate)):
        return ""
    return (
        f"note: {adopted} and {candidate} are different variants: times of imports and compile caches, and memory,"
        f' include this difference. Compare one variant: --index URL, --candidate "torch==X+{labels[0]}"'
    )


def explained(gate: GateFile) -> str:
    """Return what an UNKNOWN gate knows, in one sentence: what is equal, and what lacks data for which reason."""
    adopted, candidate = (
        {j.row.id for j in s.record.judgements} if s.record else set() for s in (gate.adopted, gate.candidate)
    )
    gaps = [f for f in gate.findings if f.decision is Decision.UNKNOWN]
    decided = (adopted & candidate) - {row for f in gaps for row in f.rows}
    other = {row for f in gate.findings for row in f.rows if f.label not in EQUAL_OUTCOMES} & decided
    compared = f"{len(decided) - len(other)} of {len(decided)} decided rows are equal"
    parts = [f"nothing was found against the candidate: {compared if decided else 'no row was decided'}"]
    for f in gaps:
        number = len(f.rows)
        what = f"{number} row{'s lack' if number != 1 else ' lacks'} data: " if f.rows else ""
        parts.append(what + (f.head or f.cause))
    return "; ".join(cut(parts))
