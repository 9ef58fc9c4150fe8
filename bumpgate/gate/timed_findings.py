"""Findings of the paired sessions and of the drift over weeks: one for each row, which the verdict groups by cause."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bumpgate.core.baseline import investigate
from bumpgate.core.findings import NO_REGRESSION, Decision, Finding, TimedOutcome
from bumpgate.core.rows import Problem
from bumpgate.gate.drift import Drift
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed import Sessions


def of_sessions(
    lane: str, row: str, t: Timed, test: str, read_once: tuple[str, str] = ("", "")
) -> list[Finding]:
    """Return the finding on a row that sessions measured; empty if it is SAME.

    read_once: value and unit of both sides in the run of the lane; "" if it has none.
    """
    if t.outcome is TimedOutcome.SAME:
        return []
    red = t.outcome in (TimedOutcome.SLOWER, TimedOutcome.SLOW_MODE)
    decision = Decision.HOLD if red else Decision.ADOPT if t.outcome in NO_REGRESSION else Decision.UNKNOWN
    if not t.sessions:  # all such rows have one cause: the budget, or only lost sessions
        unread = (f"{row}: not measured",)
        head = "no paired session gave a time"
        return [Finding(decision, t.outcome.value, "", head, (row,), (), unread, investigate(lane, test))]
    low, high = (f"{100 * (x - 1):+.1f} %" if math.isfinite(x) else "?" for x in t.interval)
    change = f"{100 * (t.ratio - 1):+.1f} % in [{low}, {high}]"
    once, first = (f"{value} in the run of the lane" if value else "" for value in read_once)
    change = f"{change} after {t.sessions} sessions, adjusted p {t.p:.2g}"
    seen = f"{row}: {first}; {change}" if first else f"{row}: {change}"
    if any(t.slow):
        seen += f"; slow processes: {t.slow[0]} of the candidate, {t.slow[1]} of the adopted build"
    metric, adopted = row.rsplit("/", 1)[1], (f"{row}: {once or 1}",)
    return [Finding(decision, t.outcome.value, metric, "", (row,), adopted, (seen,), investigate(lane, test))]


def unequal_losses(lane: str, sessions: Sessions) -> list[Finding]:
    """Return findings on tests whose timed readings the candidate loses: too noisy to use, or their processes died."""
    found = []
    for test, p in sessions.unequal_losses().items():
        lost = sessions.lost_processes[test]
        adopted, candidate = (
            f"{lost[side]} timed processes without a reading in {sessions.started} sessions"
            for side in ("adopted", "candidate")
        )
        rows = tuple(row for row, node in sessions.tests.items() if node == test)
        head = f"timed processes without a reading, more than the adopted build's (adjusted p {p:.2g})"
        repro = investigate(lane, test)
        found.append(Finding(Decision.HOLD, "LOST", "", head, rows, (adopted,), (candidate,), repro))
    return found


def of_adopted_alone(lane: str, faults: Iterable[Problem]) -> list[Finding]:
    """Return findings on tests whose timed processes failed on the adopted side alone.

    Such a fault is no evidence against the candidate. It costs a reading, and a row with too few is INCONCLUSIVE.
    """
    return [
        Finding(Decision.ADOPT, "PROBLEM", "", p.why, (), (str(p),), (), investigate(lane, p.test), (p.test,))
        for p in faults
    ]


def of_drift(lane: str, row: str, c: Drift, test: str) -> Finding:
    """Return the finding on a row that became slower over weeks."""
    adopted = f"{row}: 1 at its anchor, the build adopted a month before"
    candidate = f"{row}: {100 * (c.ratio - 1):+.1f} %, rising since {c.since}, called {c.called}"
    metric = row.rsplit("/", 1)[1]
    return Finding(
        Decision.HOLD, "CREEP", metric, "", (row,), (adopted,), (candidate,), investigate(lane, test)
    )
