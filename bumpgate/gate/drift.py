"""Detects slow drift: several bumps, each below the threshold, that add up to a regression.

Once a week the gate also pairs its candidate with the build that was adopted 30 days before: SESSIONS sessions,
no early stop, and their `sequential.estimate` is the reading of a row.
Against that anchor a drift of 1 % a week reads 1, 2, 3, 4, 4, 4 %, with constant noise per reading; a chain of
weekly steps would read 1 % each time and add up the noise of every step.

The readings go into a one-sided cumulative sum (CUSUM: Page 1954, "Continuous inspection schemes", Biometrika 41):
S = max(0, S + reading - ALLOWANCE), drift if S passes LIMIT. A reading counts for at most CAP, so that one bad week
alone is not drift; ALLOWANCE is half of the change in a month of 1 % a week.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from bumpgate.core.findings import DriftReading
from bumpgate.gate.sequential import estimate

ANCHOR_DAYS = 30
SESSIONS = 12
ALLOWANCE = 0.02
CAP = 0.04
LIMIT = 0.03
# Days of history to read. Drift is reported until it is accepted, or its readings are older than this.
HISTORY_DAYS = 183


# (lane, row ids, days) -> row id -> its readings against an anchor, by day.
Recent = Callable[[str, Sequence[str], int], Mapping[str, Sequence[DriftReading]]]


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


def find_drift(readings: Sequence[DriftReading]) -> Drift | None:
    """Return the first drift that the readings of one row show, or None.

    Pass the readings since the last accepted change of that row: an accepted change is not drift.
    Raises ValueError on readings out of order, or on a reading that is not finite.
    """
    total, run = 0.0, list[DriftReading]()
    for before, reading in zip([None, *readings], readings):
        if not math.isfinite(reading.log_ratio):
            raise ValueError(f"{reading.day}: log-ratio must be finite, got {reading.log_ratio!r}")
        if before and before.day >= reading.day:
            raise ValueError(f"readings must be in order of day: {before.day}, {reading.day}")
        total += min(reading.log_ratio, CAP) - ALLOWANCE
        run.append(reading)
        if total <= 0:
            total, run = 0.0, []
        if total > LIMIT:
            return Drift(run[0].day, reading.day, math.exp(max(r.log_ratio for r in run)))
    return None


def find_drifts(
    recent: Recent, lane: str, rows: Sequence[str], drifted: Mapping[str, Sequence[float]], today: date
) -> dict[str, Drift]:
    """Return row id -> drift, from the history and from today's sessions with the anchor (log-ratios by row)."""
    series = recent(lane, rows, HISTORY_DAYS) if rows else {}
    found = {}
    for row in rows:
        readings = [r for r in series.get(row, ()) if r.day < today]
        values = drifted.get(row, ())
        if len(values) == SESSIONS:
            readings.append(DriftReading(today, estimate(values)))
        if called := find_drift(readings):
            found[row] = called
    return found
