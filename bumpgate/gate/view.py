"""Output of `bumpgate gate`: live progress on a terminal, one line per step elsewhere, the findings at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bumpgate.core.findings import NO_REGRESSION, Decision, Finding
from bumpgate.core.gate_file import GateFile
from bumpgate.env.freeze import without_cuda
from bumpgate.gate.materiality import variants

STYLE = {Decision.HOLD: "bold red", Decision.UNKNOWN: "yellow", Decision.ADOPT: "green"}
SHOWN_LINES = 6
EQUAL_OUTCOMES = tuple(outcome.value for outcome in NO_REGRESSION)


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


def findings_text(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings: a table on a terminal, else blocks of unbroken lines, so that a log can be searched."""
    if console.is_terminal:
        console.print(_table(findings))
        return
    for f in findings:
        lines = [f"{f.decision.name:<8} {f.cause}"]
        lines += [f"{'':<8} row {row}" for row in cut(f.rows)]
        lines += [f"{'':<8} adopted:   {line}" for line in cut(f.adopted)]
        lines += [f"{'':<8} candidate: {line}" for line in cut(f.candidate)]
        lines += [f"{'':<8} -> {f.repro}"] if f.repro else []
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def cut(lines: Sequence[str]) -> list[str]:
    """Return the first SHOWN_LINES lines, and the count of the others."""
    more = len(lines) - SHOWN_LINES
    return [*lines[:SHOWN_LINES], *([f"... and {more} more in gate.json"] if more > 0 else [])]


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


def notes(gate: GateFile) -> list[str]:
    """Return the lines below the findings: moved packages, variants, acceptances, margins, and what is missing."""
    provenance = [s.record.provenance if s.record else {} for s in (gate.adopted, gate.candidate)]
    variant = other_variant(*(str(p.get("torch")) for p in provenance))
    return [
        *(f"moved: {line}" for line in cut(without_cuda(gate.moved))),
        *([variant] if variant else []),
        *(f"acceptance: {line}" for line in gate.accepted),
        *(f"margin: {line}" for line in provenance[0].get("margins", ())),
        *([explained(gate)] if gate.decision is Decision.UNKNOWN else []),
    ]


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
