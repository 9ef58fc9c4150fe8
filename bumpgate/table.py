"""What a reader sees: the verdict table of a run and the differences of a rebaseline.

On a terminal: columns and colour. Anywhere else: plain lines, nothing cut off, so that a log can be searched.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bumpgate.rows import Judgement, Record, Value, Verdict, is_number

STYLE = {
    Verdict.REGRESSION: "bold red",
    Verdict.CHANGED: "red",
    Verdict.MISSING: "magenta",
    Verdict.INSTRUMENT: "yellow",
    Verdict.INFRA: "yellow",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.WIN: "cyan",
    Verdict.PASS: "green",
}
PROBLEM = "PROBLEM"
# A row that only another device can show: neither red nor green, and said aloud.
NOT_RUN = "NOT RUN"

Entry = tuple[str, str, str, str]  # label, style, text, command


def verdict_table(record: Record, where: str, *, verbose: bool = False, terminal: int | None = None) -> str:
    """Worst first, each row that is no PASS with its command; PASS rows as counts a suite unless `verbose`.

    where: the path of record.json, as shown. terminal: its width in columns; None where stdout is none.
    """
    entries = [_entry(j) for j in _worst_first(record.judgements) if verbose or j.verdict is not Verdict.PASS]
    entries += [(PROBLEM, "bold red", problem, "") for problem in record.problems]
    entries += [(NOT_RUN, "dim", line, "") for line in record.provenance.get("not_run", ())]
    passed = Counter(j.row.id.split("/")[0] for j in record.judgements if j.verdict is Verdict.PASS)
    if passed and not verbose:
        counts = ", ".join(f"{suite} {n}" for suite, n in sorted(passed.items()))
        entries.append((Verdict.PASS.value, STYLE[Verdict.PASS], counts, ""))
    body = _coloured(entries, terminal) if terminal else _plain(entries)
    return f"{body}record: {where}\n{summary(record)}"


def summary(record: Record) -> str:
    """The run in one line: `cpu: 3 rows: 1 PASS, 2 REGRESSION; device cpu; torch 2.13.0+cpu; 312 s`."""
    labels = Counter(j.label for j in _worst_first(record.judgements))
    counts = ", ".join(f"{n} {label}" for label, n in reversed(labels.items()))
    p, rows = record.provenance, len(record.judgements)
    parts = [f"{p.get('lane')}: {rows} row{'s' * (rows != 1)}" + (f": {counts}" if counts else "")]
    parts += [f"{len(record.problems)} {PROBLEM}"] if record.problems else []
    parts += [] if record.complete else ["NOT COMPLETE"]
    left = len(p.get("not_run", ()))
    parts += [f"{left} NOT RUN: no {p.get('lane')} here"] if left else []
    parts += [f"device {p.get('device')}", f"torch {p.get('torch')}", f"{p.get('wall_seconds', 0):.0f} s"]
    return "; ".join(parts)


WIDEST = 80


def change_lines(changes: Iterable[tuple[str, Value, Value, str]]) -> str:
    """One line a change: id, old -> new, percent where both are numbers, and why. None: no such value.

    Columns are as wide as most cells need: a value may be a list of names, and its line is long alone.
    """
    rows = [
        (row_id, f"{_show(old)} -> {_show(new)}", _percent(old, new), why)
        for row_id, old, new, why in changes
    ]
    widths = [max((n for r in rows if (n := len(r[i])) <= WIDEST), default=0) for i in range(3)]
    lines = ("  ".join([*(f"{cell:<{w}}" for cell, w in zip(r, widths)), r[3]]).rstrip() for r in rows)
    return "".join(f"{line}\n" for line in lines)


def _worst_first(judgements: Sequence[Judgement]) -> list[Judgement]:
    return sorted(judgements, key=lambda j: (not j.red, j.verdict.severity, j.row.id))


def _entry(j: Judgement) -> Entry:
    text = f"{j.row.id}: {j.reason}" if j.reason else f"{j.row.id}: {_show(j.row.value)} {j.row.unit}"
    return j.label, STYLE[j.verdict], text, j.command


def _plain(entries: Iterable[Entry]) -> str:
    lines = []
    for label, _, text, command in entries:
        lines.append(f"{label:<13} {text}\n")
        if command:
            lines.append(f"{'':<13} -> {command}\n")
    return "".join(lines)


def _coloured(entries: Iterable[Entry], width: int) -> str:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, style, text, command in entries:
        cell = Text(text)
        if command:
            cell.append(f"\n-> {command}", style="dim")
        table.add_row(Text(label, style=style), cell)
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=width).print(table)
    return out.getvalue()


def _show(value: Value) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _percent(old: Value, new: Value) -> str:
    if not (is_number(old) and is_number(new) and old):
        return ""
    return f"{100 * (new - old) / abs(old):+.1f} %"
