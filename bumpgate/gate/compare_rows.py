"""Compares values that each side measured once: how much worse a candidate may be.

A stored tolerance bounds each side against the baseline alone, so a candidate may lose twice the tolerance against the
adopted build. Values that repeat to the last digit (counts, bytes, errors) are compared here, by the margins of
bumpgate.gate.materiality. Times do not repeat: one
reading never decides, and if it looks worse the paired sessions measure it again. docs/gate.md has the table.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum

from bumpgate.core import kernel_code
from bumpgate.core.baseline import violation
from bumpgate.core.findings import SAME_MARGIN
from bumpgate.core.rows import (
    TIMES,
    Judgement,
    ProblemKind,
    Record,
    Row,
    Verdict,
    is_finite,
    is_time,
    same_value,
)
from bumpgate.gate.materiality import allowed, kind_of

# Units of times and rates that a slow machine makes worse.
ABSOLUTE = re.compile(r"s|ms|us|ns|.+/s")


class ValueChange(Enum):
    """Difference of two values.

    OTHER: neither better nor worse.
    AGAIN: a time that one reading cannot judge.
    SMALL: too little to hold a bump for (bumpgate.gate.materiality).
    """

    WORSE = "WORSE"
    BETTER = "BETTER"
    OTHER = "OTHER"
    AGAIN = "AGAIN"
    SMALL = "SMALL"


def change(adopted: Row, candidate: Row) -> ValueChange | None:
    """Return what differs between two measured values of one row; None if nothing does, or if it is judged elsewhere.

    A derived expectation judges each side separately, and paired sessions judge rows with an interval.
    """
    if candidate.expected is not None or timed(candidate) or same_value(adopted.value, candidate.value):
        return None
    if candidate.better == "code":
        before_counts, after_counts = kernel_code.parse(adopted.value), kernel_code.parse(candidate.value)
        if kernel_code.worse(before_counts, after_counts):
            return ValueChange.WORSE
        return ValueChange.BETTER if kernel_code.worse(after_counts, before_counts) else None
    before, after = adopted.value, candidate.value
    sign = direction(candidate)
    factor, floor = allowed(candidate)
    listed = kind_of(candidate).listed or (candidate.tolerance and not is_time(candidate))
    if listed and is_finite(before) and is_finite(after):
        low, high = sorted((before, after))
        if not _beyond(high, low, factor, floor):
            return ValueChange.SMALL
    if isinstance(before, bool) and isinstance(after, bool) and candidate.per_build:
        return ValueChange.OTHER if after else ValueChange.WORSE  # a capability that was lost
    if not sign or not (is_finite(before) and is_finite(after)):
        return None if candidate.better == "derived" else ValueChange.OTHER
    worse, better = (after, before) if sign > 0 else (before, after)
    if _beyond(worse, better, factor, floor):
        return ValueChange.AGAIN if is_time(candidate) else ValueChange.WORSE
    if _beyond(better, worse, factor, floor):
        return None if is_time(candidate) else ValueChange.BETTER
    return ValueChange.OTHER if candidate.per_build else None


def looks_slower(adopted: Judgement, candidate: Judgement) -> bool:
    """Whether a time that each side read once must be measured again before it counts against the candidate.

    It is worse than the adopted side's by more than such readings differ, or than the reviewed value by more than its
    tolerance, and the adopted side's is not. These decide without sessions: a bound that the test derives (after a
    second reading: bumpgate.gate.remeasure), a value that the sessions cannot compare (not above 0), and a tolerance
    within which they would call the row SAME. A ratio to another implementation is judged by its own time.
    """
    row = candidate.row
    if timed(row) or row.own or not is_time(row) or kinds(adopted.row, row) or candidate.accepted:
        return False
    if not all(is_finite(j.row.value) and j.row.value > 0 for j in (adopted, candidate)):
        return False
    against_review = candidate.verdict is Verdict.REGRESSION and not adopted.red and violation(row) is None
    if against_review and candidate.tolerance < SAME_MARGIN:
        return False
    return against_review or change(adopted.row, row) is ValueChange.AGAIN


def slow_in_both(adopted: Judgement, candidate: Judgement, *, paired: bool) -> bool:
    """Whether a time or rate misses its limit on both sides, and is not worse on the candidate: the machine is slow.

    Both sides ran on that machine, so that they compare with each other. paired: the sessions compare them. Otherwise
    the candidate's single reading may be worse by as much as readings of one build differ. A slow machine does not
    explain a ratio of times, a share of a roofline, or any other quotient.
    """
    both = all(j.verdict is Verdict.REGRESSION and is_finite(j.row.value) for j in (adopted, candidate))
    sign = direction(candidate.row)
    if not (both and sign and ABSOLUTE.fullmatch(candidate.row.unit)) or kinds(adopted.row, candidate.row):
        return False
    before, after = adopted.row.value, candidate.row.value
    assert is_finite(before)
    assert is_finite(after)
    worse, better = (after, before) if sign > 0 else (before, after)
    return paired or not _beyond(worse, better, TIMES.get(candidate.row.unit, TIMES["ms"]), 0.0)


def kinds(adopted: Row, candidate: Row) -> dict[str, tuple[str | bool, str | bool]]:
    """Return field -> its two values, of the fields without which the values of a row cannot be compared."""
    names = ("work", "unit", "better", "per_build")
    pairs = {name: (getattr(adopted, name), getattr(candidate, name)) for name in names}
    pairs["timed"] = timed(adopted), timed(candidate)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def timed(row: Row) -> bool:
    """Whether the paired sessions measure this row in every gate."""
    return row.interval is not None or (row.paired and row.better != "exact")


def direction(row: Row) -> int:
    """Return 1 if lower is better, -1 if higher is, 0 if neither."""
    if row.better in ("lower", "higher"):
        return 1 if row.better == "lower" else -1
    if row.per_build:  # kernels, breaks, bytes of generated code
        return 1
    return (row.at_most is not None) - (row.at_least is not None)


def _beyond(high: float, low: float, factor: float, floor: float) -> bool:
    """Whether `high` exceeds `low` by more than the factor allows, whatever the signs."""
    if high <= low:
        return False
    if floor > 0:
        low, high = max(low, floor), max(high, floor)
    return high > low + (factor - 1) * abs(low)


def with_disturbed(record: Record, other: Record) -> Record:
    """Return the record with an INFRA row for each row of `other` whose test the machine stopped here.

    A lane run lists such a test as a problem if none of its rows is reviewed; the rows take the problem's place.
    """
    stopped = {p.test: p.why for p in record.problems if p.kind is ProblemKind.INFRA}
    known = {j.row.id for j in record.judgements}
    missing = [j.row for j in other.judgements if j.row.test in stopped and j.row.id not in known]
    named = {row.test for row in missing}
    added = []
    for row in missing:
        lost = Row(row.id, None, row.unit, 0, "", better=row.better, test=row.test, per_build=row.per_build)
        added.append(Judgement(lost, Verdict.INFRA, stopped[row.test]))
    left = [p for p in record.problems if p.kind is not ProblemKind.INFRA or p.test not in named]
    return replace(record, judgements=(*record.judgements, *added), problems=tuple(left))
