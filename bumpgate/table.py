"""Text output: the verdict table of a run and the differences of a rebaseline.

Lines are not broken, so that a log can be searched, and a command copied; on a terminal they have colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.style import Style

from bumpgate.core.baseline import accept_new
from bumpgate.core.errors import one_line
from bumpgate.core.outcomes import SKIPPED, is_skipped
from bumpgate.core.rows import Judgement, Record, Value, Verdict, is_number
from bumpgate.core.rules import places, sentence
from bumpgate.core.text import printable, redacted

STYLE = {
    Verdict.REGRESSION: "bold red",
    Verdict.CHANGED: "red",
    Verdict.MISSING: "magenta",
    Verdict.NEW: "cyan",
    Verdict.INSTRUMENT: "yellow",
    Verdict.INFRA: "yellow",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.WIN: "cyan",
    Verdict.FIXED: "cyan",
    Verdict.PASS: "green",
}
PROBLEM = "PROBLEM"
# A row that cannot be measured on this device or in this environment: listed, neither red nor green.
NOT_RUN = "NOT RUN"

Entry = tuple[str, str, str, str]  # label, style, text, command


def verdict_table(record: Record, where: str, *, verbose: bool = False, terminal: bool = False) -> str:
    """Format the verdicts, worst first, with a command for rows other than PASS; PASS rows as counts per suite.

    verbose: list the PASS rows too. where: the path of record.json, as shown. terminal: stdout is one.
    """
    stopped = [j for j in record.judgements if j.unreached]
    rows = [j for j in record.judgements if j not in stopped] if len(stopped) > 1 else record.judgements
    alike: dict[str, list[Judgement]] = {}
    for j in rows:
        if j.explains and j.verdict is Verdict.INCONCLUSIVE:
            alike.setdefault(j.reason.partition(": measured")[0], []).append(j)
    unlike_host = {reason: found for reason, found in alike.items() if len(found) > 1}
    new = [j for j in rows if j.verdict is Verdict.NEW and j.red]
    together = {j.row.id for found in (new, *unlike_host.values()) for j in found}
    shown = [j for j in rows if (verbose or j.verdict is not Verdict.PASS) and j.row.id not in together]
    entries = [_entry(j, record) for j in _worst_first(shown)]
    entries += [_together(f"{len(f)} rows: {why}", f, f[0].command) for why, f in unlike_host.items()]
    if new:
        title = f"{len(new)} row{'s' * (len(new) != 1)} measured and never reviewed"
        entries.append(_together(title, new, accept_new(record)))
    if len(stopped) > 1:
        text = f"{len(stopped)} rows not measured because the run stopped early"
        entries.append((Verdict.MISSING.value, STYLE[Verdict.MISSING], text, ""))
    entries += [(PROBLEM, "bold red", str(problem), "") for problem in record.problems]
    entries += [(NOT_RUN, "dim", line, "") for line in record.provenance.get("not_run", ())]
    passed = Counter(j.row.id.split("/")[0] for j in record.judgements if j.verdict is Verdict.PASS)
    if passed and not verbose:
        counts = ", ".join(f"{suite} {n}" for suite, n in sorted(passed.items()))
        entries.append((Verdict.PASS.value, STYLE[Verdict.PASS], counts, ""))
    return f"{listing(entries, terminal=terminal)}record: {where}\n{summary(record)}"


def listing(entries: Iterable[Entry], *, terminal: bool) -> str:
    """Format entries, commands below their texts, as unbroken lines. terminal: with colours."""
    lines = []
    for label, style, text, command in entries:
        head = f"{label:<13}"
        first, *rest = printable(redacted(text)).split("\n")
        lines.append(f"{Style.parse(style).render(head) if terminal else head} {first}\n")
        lines += [f"{'':<13} {line}\n" for line in rest]
        if command:
            lines.append(f"{'':<13} -> {command}\n")
    return "".join(lines)


def summary(record: Record) -> str:
    """Summarize the run in one line: `cpu: 3 rows: 1 PASS, 2 REGRESSION; device cpu; torch 2.13.0+cpu; 312 s`."""
    labels = Counter(SKIPPED if is_skipped(j.row) else j.label for j in _worst_first(record.judgements))
    counts = ", ".join(f"{n} {label}" for label, n in reversed(labels.items()))
    p, rows = record.provenance, len(record.judgements)
    parts = [f"{p.get('lane')}: {rows} row{'s' * (rows != 1)}" + (f": {counts}" if counts else "")]
    parts += [f"{len(record.problems)} {PROBLEM}"] if record.problems else []
    parts += [] if record.complete else ["NOT COMPLETE"]
    parts += [part] if (part := part_of_lane(p.get("part"))) else []
    left = len(p.get("not_run", ()))
    stand_in = f": no {p.get('lane')} here" if str(p.get("device")).startswith("pjrt-") else ""
    parts += [f"{left} NOT RUN{stand_in}"] if left else []
    parts += [f"device {p.get('device')}", f"torch {p.get('torch')}", f"{p.get('wall_seconds', 0):.0f} s"]
    return "; ".join(parts)


def part_of_lane(part: Sequence[int | None] | None) -> str:
    """Format `part` of a record's provenance: `part of the lane: 2 of 9 rows`; "" for a run of the whole lane."""
    if not part:
        return ""
    measured, reviewed = part
    if measured == reviewed:
        return f"part of the lane: all {reviewed} reviewed rows, but not all tests"
    return f"part of the lane: {measured}{'' if reviewed is None else f' of {reviewed}'} rows"


WIDEST = 80


def change_lines(changes: Iterable[tuple[str, Value, Value, str]]) -> str:
    """Format one line per change: id, old -> new, percent if both are numbers, and the reason. None: no such value.

    Columns are as wide as most cells need: a value may be a list of names, which makes only its own line longer.
    """
    rows = [
        (row_id, f"{show(old)} -> {show(new)}", _percent(old, new), why) for row_id, old, new, why in changes
    ]
    widths = [max((n for r in rows if (n := len(r[i])) <= WIDEST), default=0) for i in range(3)]
    lines = ("  ".join([*(f"{cell:<{w}}" for cell, w in zip(r, widths)), r[3]]).rstrip() for r in rows)
    return "".join(f"{line}\n" for line in lines)


def _worst_first(judgements: Sequence[Judgement]) -> list[Judgement]:
    return sorted(judgements, key=lambda j: (not j.red, j.verdict.severity, j.row.id))


def _entry(j: Judgement, record: Record) -> Entry:
    """Format a row with its reason; rows other than PASS also with their numbers, rule and place."""
    text = f"{j.row.id}: {j.reason}" if j.reason else f"{j.row.id}: {show(j.row.value)} {j.row.unit}"
    lines = [text]
    if j.verdict is not Verdict.PASS and not j.row.unmeasured:
        # Long texts are complete in the reason above.
        value, reviewed, limit = (
            one_line(x, 40) for x in (show(j.row.value), show(j.reviewed), j.limit or "-")
        )
        lines.append(f"value {value} | reviewed {reviewed} | limit {limit}")
        lines += [rule] if (rule := sentence(record, j.row.rule)) else []
        lines += [f"at {where}"] if (where := places(j)) else []
    return j.label, STYLE[j.verdict], "\n".join(lines), j.command


def _together(title: str, found: Sequence[Judgement], command: str) -> Entry:
    """Format rows of one cause: a line each, and one command for all."""
    lines = [
        f"{j.row.id}: {show(j.row.value)} {j.row.unit}"
        + (f", reviewed {show(j.reviewed)}" if j.reviewed is not None else "")
        for j in found
    ]
    return found[0].label, STYLE[found[0].verdict], "\n".join([title, *sorted(lines)]), command


def show(value: Value) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _percent(old: Value, new: Value) -> str:
    if not (is_number(old) and is_number(new) and old):
        return ""
    return f"{100 * (new - old) / abs(old):+.1f} %"
