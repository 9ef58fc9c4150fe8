"""Acceptances of `bumpgate accept`, applied to the timed rows of a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date

from bumpgate.core.accepted import Acceptance, of_lane
from bumpgate.core.findings import TimedOutcome
from bumpgate.gate.drift import Drift, covers
from bumpgate.gate.sequential import Timed


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
