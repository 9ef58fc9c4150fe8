"""Hosts: whether a reviewed time holds on the machine that measured a row.

A time states what bounds it (`Row.bound`). Each run measures these properties of its host, as rows of their own:
`calibration/<bound>/<metric>`. The times of a baseline belong to the host whose calibrations it holds. Elsewhere a time
is shown, not judged, and no calibration corrects it: on one host a common factor explains little of a time's spread.

Standard library only: this file must import under any candidate torch, and under none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bumpgate.core.baseline import CALIBRATION, Baseline, Build, comparable, judge, times, violation
from bumpgate.core.rows import TIMES, Judgement, Row, Verdict, is_finite, is_number, is_time, of_time

# Verdicts on a value itself. Any other says that there is no value to compare.
SETTLED = (Verdict.PASS, Verdict.WIN, Verdict.REGRESSION, Verdict.INCONCLUSIVE)
# Tolerance of the calibrations for a limit, whose row has none.
OF_LIMITS = 0.1
# Units in which a person reads a rate: unit -> (divisor, name).
READABLE = {"bytes/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}


def on_this_host(
    judgement: Judgement, baseline: Baseline, host: Mapping[str, Any], measured: Mapping[str, float]
) -> Judgement:
    """Show, but do not judge, a time that was reviewed on a host unlike this one, or a limit in seconds of such a host.

    A time or rate that meets its limit on a slower host is judged: the build needs no excuse. A derived expectation
    without a bound, a broken instrument and a row that is not comparable for another reason are not changed.

    host: lane, device, cpu and cores. measured: the calibrations of this host by row id.
    """
    row = judgement.row
    old = baseline.rows.get(row.id)
    if judgement.verdict not in SETTLED or old is None or not is_time(row) or row.id.startswith(CALIBRATION):
        return judgement
    broken = violation(row) is not None
    limited = broken and row.bound and row.expected is None and is_finite(row.value)
    if not limited and (broken or row.better not in ("lower", "higher")):
        return judgement
    met = judgement.verdict in (Verdict.PASS, Verdict.WIN) and row.unit not in ("ratio", "fraction")
    reason = unlike(row, baseline, host, measured, slower_will_do=met)
    if reason is None:
        return judgement
    return replace(judgement, verdict=Verdict.INCONCLUSIVE, reason=reason, command="", explains=True)


def unlike(
    row: Row,
    baseline: Baseline,
    host: Mapping[str, Any],
    measured: Mapping[str, float],
    *,
    slower_will_do: bool = False,
) -> str | None:
    """Return how this host differs from the one of a row's reviewed time, in one sentence; None if it does not.

    A row without a bound is judged on hosts of the same class. slower_will_do: a calibration may be worse here.
    """
    old = baseline.rows.get(row.id)
    bound = row.bound or (old.bound if old else "")
    if not bound:
        return comparable(baseline.made_with, host)
    # The calibrations measure what the processor and its cores mean for a time.
    facts = {name: value for name, value in host.items() if name in ("lane", "device")}
    if reason := comparable(baseline.made_with, facts):
        return reason
    return next(
        (why for name in bound.split(", ") if (why := _other(name, row, baseline, measured, slower_will_do))),
        None,
    )


def _other(
    bound: str, row: Row, baseline: Baseline, measured: Mapping[str, float], slower_will_do: bool
) -> str | None:
    """Return how this host's calibrations of one bound differ from the reviewed ones by more than the tolerance."""
    old = baseline.rows.get(row.id)
    prefix, tolerance = f"{CALIBRATION}{bound}/", (old.tolerance if old else row.tolerance) or OF_LIMITS
    reviewed = {
        id: (reference.value, reference.unit)
        for id, reference in baseline.rows.items()
        if id.startswith(prefix) and is_number(reference.value)
    }
    if not reviewed:
        return (
            f"its reviewed host has no calibration of {bound}: review this one with: {times(baseline.lane)}"
        )
    for id, (value, unit) in reviewed.items():
        name, here = id.removeprefix(CALIBRATION), measured.get(id)
        if here is None:
            return f"this process has not measured {name}, which bounds it"
        slower = here > value if unit in TIMES else here < value
        if abs(here - value) > tolerance * abs(value) and not (slower and slower_will_do):
            divisor, shown = READABLE.get(unit, (1.0, unit))
            return f"this host's {name}: {here / divisor:.4g} {shown}, reviewed {value / divisor:.4g} {shown}"
    return None


def of_host(id: str, better: str, unit: str) -> bool:
    """Return whether the host decides the value of a row: a reviewed time or rate, or a calibration."""
    return id.startswith(CALIBRATION) or (better in ("lower", "higher") and of_time(id, unit))


def measured_in(rows: Iterable[Row]) -> dict[str, float]:
    """Return the calibrations among the rows of a record."""
    return {row.id: row.value for row in rows if row.id.startswith(CALIBRATION) and is_number(row.value)}


def judge_again(
    rows: Iterable[Row], baseline: Baseline, host: Mapping[str, Any], build: Build
) -> list[Judgement]:
    """Return the judgements of a record's rows against a baseline, as a run on the record's host makes them."""
    rows = list(rows)
    measured = measured_in(rows)
    found = [judge(row, baseline, failed_instruments={}, build=build) for row in rows]
    return [on_this_host(judgement, baseline, host, measured) for judgement in found]
