"""Output of `bumpgate gate`: live progress on a terminal, one line per step elsewhere, the findings at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bumpgate.core.findings import Decision, Finding, TimedOutcome
from bumpgate.gate.timed import Sessions

STYLE = {Decision.HOLD: "bold red", Decision.UNKNOWN: "yellow", Decision.ADOPT: "green"}
SHOWN_LINES = 6


class View:
    """Progress output on `console` (stderr), so that stdout holds only the findings."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str) -> None:
        """Print one finished step."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a running step: on a terminal, a temporary line that the yielded function rewrites."""
        if not self.console.is_terminal:
            yield lambda text: None
            return
        with self.console.status(Text(what)) as status:
            yield lambda text: status.update(Text(text))


def session_line(sessions: Sessions) -> str:
    """Format the progress of the sessions: `8 sessions of at most 32; 2 of 3 rows open`."""
    rows, still = len(sessions.tests), len(sessions.open_rows())
    return f"{sessions.started} sessions of at most {sessions.limit}; {still} of {rows} rows open"


def timed_line(outcomes: Sequence[TimedOutcome], sessions: Sessions) -> str:
    """`timed rows after 12 sessions: 2 SAME, 1 SLOWER`, and why a time was last lost, if any."""
    counts = [f"{outcomes.count(o)} {o.value}" for o in TimedOutcome if o in outcomes]
    line = f"timed rows after {sessions.started} sessions: {', '.join(counts) or 'none'}"
    return f"{line}; last lost: {sessions.lost}" if sessions.lost else line


def findings_text(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings: a table on a terminal, else blocks of unbroken lines, so that a log can be searched."""
    if console.is_terminal:
        console.print(_table(findings))
        return
    for f in findings:
        console.print(_block(f), markup=False, highlight=False, soft_wrap=True)


def cut(lines: Sequence[str]) -> list[str]:
    """Return the first SHOWN_LINES lines, and the count of the others."""
    more = len(lines) - SHOWN_LINES
    return [*lines[:SHOWN_LINES], *([f"... and {more} more in gate.json"] if more > 0 else [])]


def _block(f: Finding) -> str:
    lines = [f"{f.decision.name:<8} {f.cause}"]
    lines += [f"{'':<8} row {row}" for row in cut(f.rows)]
    lines += [f"{'':<8} adopted:   {line}" for line in cut(f.adopted)]
    lines += [f"{'':<8} candidate: {line}" for line in cut(f.candidate)]
    return "\n".join([*lines, f"{'':<8} -> {f.repro}"] if f.repro else lines)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for title in ("", "cause", "adopted", "candidate"):
        table.add_column(title, overflow="fold", no_wrap=not title)
    for f in findings:
        what = Text("\n".join([f.cause, *cut(f.rows)]))
        if f.repro:
            what.append(f"\n-> {f.repro}", style="dim")
        sides = (Text("\n".join(cut(side))) for side in (f.adopted, f.candidate))
        table.add_row(Text(f.decision.name, style=STYLE[f.decision]), what, *sides)
    return table
