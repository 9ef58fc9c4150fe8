"""Detects slow drift: several bumps, each below the threshold, that add up to a regression.

Once a week the gate also pairs its candidate with the build that was adopted 30 days before: SESSIONS sessions,
no early stop, and their `sequential.estimate` is the reading of a row.
Against that anchor a drift of 1 % a week reads 1, 2, 3, 4, 4, 4 %, with constant noise per reading; a chain of
weekly steps would read 1 % each time and add up the noise of every step.

The readings go into a one-sided cumulative sum (CUSUM: Page 1954, "Continuous inspection schemes", Biometrika 41):
S = max(0, S + reading - ALLOWANCE), drift if S passes LIMIT. A reading counts for at most CAP, so that one bad week
alone is not drift; ALLOWANCE is half of the change in a month of 1 % a week.

After a drift that `bumpgate accept` accepted, the sum starts again: the next drift is another change. The readings of
the next month still contain the accepted change, which is subtracted from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta

from bumpgate.core.accepted import Acceptance, of_lane
from bumpgate.core.findings import DriftReading, TimedOutcome
from bumpgate.gate.sequential import Timed, estimate

ANCHOR_DAYS = 30
SESSIONS = 12
ALLOWANCE = 0.02
CAP = 0.04
LIMIT = 0.03
# The largest reading of an accepted drift may be larger by this in the next gate, which measures it again.
NOISE = 0.01
# Days of history to read. Drift is reported until it is accepted, or its readings are older than this.
HISTORY_DAYS = 183


# (lane, row ids, days) -> row id -> its readings against an anchor, by day.
Recent = Callable[[str, Sequence[str], int], Mapping[str, Sequence[DriftReading]]]
# (lane, row ids, days) -> row id -> its oldest value.
Oldest = Callable[[str, Sequence[str], int], Mapping[str, float]]


@dataclass(frozen=True)
class Drift:
    """since: the first reading of the detected run. called: the reading at which the sum passed the limit.

    ratio: the largest reading of the run, as a ratio of times (1.04 is 4 % slower than the anchor).
    """

    since: date
    called: date
    ratio: float


def anchor(adopted: Iterable[date], today: date) -> date | None:
    """Return the day of adoption nearest to 30 days ago; of two equally near, the earlier. None without an adoption."""
    before = sorted(day for day in adopted if day < today)
    return min(before, key=lambda day: abs((today - day).days - ANCHOR_DAYS), default=None)


def find_drift(readings: Sequence[DriftReading], accepted: Mapping[date, float] = {}) -> Drift | None:
    """Return the first drift that the readings of one row show, or None.

    accepted: day -> the part of its log-ratio that is an accepted change, which is not drift.
    Raises ValueError on readings out of order, or on a reading that is not finite.
    """
    total, run = 0.0, list[DriftReading]()
    for before, reading in zip([None, *readings], readings):
        if not math.isfinite(reading.log_ratio):
            raise ValueError(f"{reading.day}: log-ratio must be finite, got {reading.log_ratio!r}")
        if before and before.day >= reading.day:
            raise ValueError(f"readings must be in order of day: {before.day}, {reading.day}")
        total += min(reading.log_ratio - accepted.get(reading.day, 0.0), CAP) - ALLOWANCE
        run.append(reading)
        if total <= 0:
            total, run = 0.0, []
        if total > LIMIT:
            return Drift(run[0].day, reading.day, math.exp(max(r.log_ratio for r in run)))
    return None


def covers(entry: Acceptance, drift: Drift) -> bool:
    """Return whether an entry accepts a drift: it is no larger, and began within a month of the entry."""
    if entry.ratio is None or drift.since > entry.since + timedelta(ANCHOR_DAYS):
        return False
    return drift.ratio <= entry.ratio * math.exp(NOISE)


def successive_drifts(readings: Sequence[DriftReading], entries: Sequence[Acceptance]) -> list[Drift]:
    """Return the drifts of one row that entries cover, one after the other, then the first that none covers."""
    found, accepted = list[Drift](), dict[date, float]()
    while called := find_drift(readings, accepted):
        found.append(called)
        ratios = [(entry.ratio or 1.0, entry.since) for entry in entries if covers(entry, called)]
        if not ratios:
            break
        ratio, since = max(ratios)
        last = max(called.called, since) + timedelta(ANCHOR_DAYS)
        readings = [r for r in readings if r.day > called.called]
        accepted = {r.day: math.log(ratio) for r in readings if r.day <= last}
    return found


def find_drifts(
    series: Mapping[str, Sequence[DriftReading]],
    lane: str,
    rows: Sequence[str],
    drifted: Mapping[str, Sequence[float]],
    today: date,
    acceptances: Iterable[Acceptance] = (),
) -> dict[str, list[Drift]]:
    """Return row id -> its drifts, from earlier readings and today's sessions with the anchor (log-ratios by row).

    series: readings of the last HISTORY_DAYS.
    The drifts are those that acceptances cover today, in order, then the first that none covers.
    """
    entries = of_lane((a for a in acceptances if not a.expired(today)), lane)
    found = {}
    for row in rows:
        readings = [r for r in series.get(row, ()) if r.day < today]
        values = drifted.get(row, ())
        if len(values) == SESSIONS:
            readings.append(DriftReading(today, estimate(values)))
        if drifts := successive_drifts(readings, entries.get(row, ())):
            found[row] = drifts
    return found


def apply_to_times(
    timed: Mapping[str, Timed],
    drifts: Mapping[str, Sequence[Drift]],
    acceptances: Iterable[Acceptance],
    lane: str,
    day: date,
) -> tuple[dict[str, Timed], dict[str, Drift], list[str]]:
    """Apply acceptances to the times of a gate: an accepted slowdown becomes SAME, accepted drift is dropped.

    An entry matches unless the measured interval lies completely above the accepted ratio, so a row that slows
    further is SLOWER again. drifts: as find_drifts returns them; only the last one of a row can lack an entry.
    The third value has one line for each entry that was used, or that has expired.
    """
    times, lines = dict(timed), list[str]()
    drifted = {row: found[-1] for row, found in drifts.items()}
    for row, entries in sorted(of_lane(acceptances, lane).items()):
        for a in entries:
            if a.ratio is None:
                continue
            slower = (
                row in times
                and times[row].outcome is TimedOutcome.SLOWER
                and times[row].interval[0] <= a.ratio
            )
            crept = [drift for drift in drifts.get(row, ()) if covers(a, drift)]
            if not (slower or crept):
                continue
            if a.expired(day):
                lines.append(f"{row} {a.measured}: EXPIRED {a.expires}; {a.owner}: {a.reason}")
                continue
            lines.append(f"{row} {a.measured}: accepted by {a}")
            if slower:
                left = TimedOutcome.SLOW_MODE if times[row].mode else TimedOutcome.SAME
                times[row] = replace(times[row], outcome=left)
            if drifted.get(row) in crept:
                del drifted[row]
    return times, drifted, lines
