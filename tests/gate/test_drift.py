"""Slow drift: 1 % a week is reported by week 6, and a year without change gives no report.

A weekly reading is the estimate from 12 sessions, with the noise of tests/support/simulation.py.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import gate_file
from bumpgate.core.accepted import Acceptance
from bumpgate.core.findings import Decision, DriftReading, TimedOutcome
from bumpgate.gate import drift, pairing, state
from bumpgate.gate.drift import Drift, anchor, covers, find_drift, find_drifts, successive_drifts
from bumpgate.gate.options import GateConfig
from bumpgate.gate.sequential import estimate
from bumpgate.gate.state import Gate
from bumpgate.process.runner import LaneRun
from bumpgate.review import accept
from suites.support.planted import planted
from tests.support.gating import TODAY, Behaviour, Machine, labels
from tests.support.simulation import NOISES, ROWS, rate_text, row_noise, wilson

FIXED = settings(derandomize=True, max_examples=60, deadline=None)
START = date(2026, 1, 5)
WEEKS = [START + timedelta(weeks=n) for n in range(1, 53)]
STEP = math.log(1.01)
POOL = 4000


def week(n: int) -> date:
    return START + timedelta(weeks=n)


def readings(log_ratios: list[float]) -> list[DriftReading]:
    return [DriftReading(day, x) for day, x in zip(WEEKS, log_ratios)]


@lru_cache
def weekly_errors(noise: str) -> list[float]:
    """Return a sample of errors of weekly readings."""
    rng, out = random.Random(0), []
    for _ in range(POOL):
        draw = row_noise(rng, noise)
        out.append(estimate([draw() for _ in range(drift.SESSIONS)]))
    return out


def drifting(weeks: int) -> list[float]:
    """Log-ratios to the anchor if each week adds 1 %, and the weeks before the first were equal."""
    adopted = [week(-n) for n in range(1, 9)]
    out = []
    for n in range(1, weeks + 1):
        adopted.append(week(n - 1))
        back = anchor(adopted, week(n))
        assert back
        out.append(STEP * (n - max(0, (back - START).days // 7)))
    return out


def quiet_runs(rng: random.Random, noise: str, runs: int) -> int:
    """Count years without a report for any of 15 rows."""
    errors = weekly_errors(noise)
    return sum(not any(find_drift(readings(rng.choices(errors, k=52))) for _ in ROWS) for _ in range(runs))


def reported_by_week_6(rng: random.Random, noise: str, runs: int) -> tuple[int, list[int]]:
    """Count drifts reported by week 6, and return the weeks of their reports."""
    errors, weeks = weekly_errors(noise), []
    for _ in range(runs):
        found = find_drift(readings([x + rng.choice(errors) for x in drifting(6)]))
        if found:
            weeks.append((found.called - START).days // 7)
    return len(weeks), weeks


@pytest.mark.parametrize("noise", NOISES)
def test_year_without_change_reports_no_drift(noise: str) -> None:
    runs = 600
    quiet = quiet_runs(random.Random(1), noise, runs)
    text = rate_text("quiet years", quiet, runs)
    print(text)
    assert wilson(quiet, runs)[0] >= 0.98, text


@pytest.mark.parametrize("noise", NOISES)
def test_drift_of_1_percent_a_week_is_reported_by_week_6(noise: str) -> None:
    runs = 2000
    hits, weeks = reported_by_week_6(random.Random(2), noise, runs)
    text = f"{rate_text('reported by week 6', hits, runs)}; median week {statistics.median(weeks):g}"
    print(text)
    assert wilson(hits, runs)[0] >= 0.95, text


def test_mutant_without_allowance_reports_false_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "ALLOWANCE", 0.0)
    quiet = quiet_runs(random.Random(1), NOISES[0], 20)
    assert wilson(quiet, 20)[1] < 0.98


def test_mutant_that_reads_weekly_steps_fails_at_any_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this limit it is both too late and too noisy; a higher one reports later, a lower one more often."""
    monkeypatch.setattr(drift, "ALLOWANCE", 0.005)  # half of a step: its best value
    rng = random.Random(2)
    errors = weekly_errors(NOISES[0])
    runs = 300
    hits = sum(
        find_drift(readings([STEP + rng.choice(errors) for _ in range(6)])) is not None for _ in range(runs)
    )
    assert wilson(hits, runs)[1] < 0.95, rate_text("reported by week 6", hits, runs)
    quiet = quiet_runs(rng, NOISES[0], 100)
    assert wilson(quiet, 100)[1] < 0.98, rate_text("quiet years", quiet, 100)


def test_mutant_without_cap_reports_one_bad_week(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = readings([0.0, 0.0, 0.2, 0.0, 0.0])
    assert find_drift(candidate) is None
    monkeypatch.setattr(drift, "CAP", math.inf)
    assert find_drift(candidate) is not None


def test_anchor_is_a_month_old() -> None:
    assert drifting(6) == pytest.approx([STEP * n for n in (1, 2, 3, 4, 4, 4)])
    assert anchor([], START) is None
    assert anchor([START], START) is None
    assert anchor([week(-1), week(3)], START) == week(-1)
    assert anchor([START - timedelta(29), START - timedelta(31)], START) == START - timedelta(31)


def test_drift_reports_its_weeks_and_size() -> None:
    found = find_drift(readings([0.0, 0.0, 0.03, 0.04, 0.05, 0.04]))
    assert found == drift.Drift(week(3), week(5), math.exp(0.05))


@FIXED
@given(st.lists(st.floats(-0.5, drift.ALLOWANCE), max_size=60))
def test_drift_within_the_allowance_is_not_reported(log_ratios: list[float]) -> None:
    assert find_drift(readings(log_ratios)) is None


@FIXED
@given(st.lists(st.floats(-0.1, 0.1), max_size=30), st.lists(st.floats(-0.1, 0.1), max_size=10))
def test_reported_drift_stays_reported(log_ratios: list[float], later: list[float]) -> None:
    """Red until it is fixed and accepted, independent of later readings."""
    found = find_drift(readings(log_ratios))
    if found:
        assert find_drift(readings(log_ratios + later)) == found


@pytest.mark.parametrize("candidate", [math.nan, math.inf])
def test_non_finite_reading_is_refused(candidate: float) -> None:
    with pytest.raises(ValueError, match="log-ratio must be finite"):
        find_drift(readings([0.0, candidate]))


def test_readings_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in order of day"):
        find_drift([DriftReading(week(2), 0.0), DriftReading(week(1), 0.0)])


# Drift over several gates, the month-old build that it is measured against, and accepted slowdowns.


WITH_ANCHOR = GateConfig("cpu", candidate="torch", anchor="torch==2.12.0")


def weekly(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weeks: int) -> list[Gate]:
    """One gate per week, each 1 % slower than the last; the anchor is the build of four weeks before."""
    row = "throughput/b/seconds"
    history: list[DriftReading] = []
    gates = []
    for week in range(1, weeks + 1):
        machine.recent = {row: tuple(history)}
        machine.sides["candidate"].slower = {row: 1.01**week}
        machine.sides["adopted"].slower = {row: 1.01 ** (week - 1)}
        machine.sides["anchor"].slower = {row: 1.01 ** max(0, week - 4)}
        day = TODAY + timedelta(weeks=week)
        monkeypatch.setattr("tests.support.gating.TODAY", day)
        machine.seed = week
        gate = machine.gate(tmp_path / f"week{week}", GateConfig("cpu", candidate="torch", anchor="torch==0"))
        gates.append(gate)
        found = gate_file.read(tmp_path / f"week{week}" / state.NAME)
        assert isinstance(found, gate_file.GateFile)
        history.append(DriftReading(day, found.readings[row]))
    return gates


def test_gates_report_1_percent_weekly_drift_by_week_6(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = weekly(machine, tmp_path, monkeypatch, 6)
    last = labels(gates[-1])
    assert ("HOLD", "CREEP") in last, [labels(g) for g in gates]
    assert not any("CREEP" in found for _, found in labels(gates[1])), "two weeks are no drift yet"


def test_drift_from_history_holds_until_accepted(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bumpgate accept` takes its ratio from the gate, whose paired sessions read SAME."""
    row = "throughput/b/seconds"
    weeks = [TODAY - timedelta(weeks=n) for n in (4, 3, 2, 1)]
    machine.recent = {row: tuple(DriftReading(day, x) for day, x in zip(weeks, (0.03, 0.04, 0.04, 0.04)))}
    assert labels(machine.gate(out)) == [("HOLD", "CREEP")]
    monkeypatch.chdir(machine.root)
    monkeypatch.setattr(accept, "today", lambda: TODAY)
    last = str(TODAY + timedelta(days=9))
    who = {"owner": "ann", "reason": "known", "expires": last}
    accept.command(row, "cpu", **who, record=out / state.NAME, other_tree=True)
    accepted = machine.gate(out.with_name("accepted"))
    assert (accepted.decision, len(accepted.accepted)) == (Decision.ADOPT, 1)


def test_later_drift_of_an_accepted_row_holds(machine: Machine, out: Path) -> None:
    row, changes = "throughput/b/seconds", (0.03, 0.04, 0.04, 0.04, 0.0, 0.0, 0.05, 0.07, 0.09, 0.1)
    write_acceptance(machine.root, row, 1.05, TODAY + timedelta(days=9))
    machine.recent = {row: tuple(weeks(*changes))}
    gate = machine.gate(out)
    assert (labels(gate), len(gate.accepted)) == ([("HOLD", "CREEP")], 1)
    assert gate.drifts[row].ratio > 1.07


def write_acceptance(root: Path, row: str, ratio: float, expires: date) -> None:
    (root / "baselines").mkdir()
    (root / "baselines/accepted.toml").write_text(
        f'[[accepted]]\nlane = "cpu"\nrow = "{row}"\nratio = {ratio}\nowner = "ann"\n'
        f'reason = "known"\nsince = {expires - timedelta(days=30)}\nexpires = {expires}\n'
    )


@pytest.mark.parametrize(
    ("ratio", "days", "decision"),
    [(1.06, 1, Decision.ADOPT), (1.06, -1, Decision.HOLD), (1.01, 1, Decision.HOLD)],
    ids=["accepted", "expired", "slower than that"],
)
def test_accepted_slowdown_is_adopted_until_it_expires(
    machine: Machine, out: Path, ratio: float, days: int, decision: Decision
) -> None:
    row = "throughput/b/seconds"
    machine.sides["candidate"].slower = {row: 1.06}
    write_acceptance(machine.root, row, ratio, TODAY + timedelta(days=days))
    gate = machine.gate(out)
    assert (gate.decision, gate.timed[row].outcome) == (decision, TimedOutcome.SLOWER)
    assert len(gate.accepted) == (ratio > 1.01)


def test_anchor_that_cannot_be_paired_is_unknown(machine: Machine, out: Path) -> None:
    machine.sides["anchor"].failure = "import torch: exit 1"
    assert labels(machine.gate(out, WITH_ANCHOR)) == [("UNKNOWN", "INFRA")]


def test_row_without_readings_of_the_anchor_is_unknown(machine: Machine, out: Path) -> None:
    machine.sides["anchor"].signal, machine.sides["anchor"].dies_from = 11, 3
    gate = machine.gate(out, WITH_ANCHOR)
    (finding,) = gate.findings
    assert (finding.decision, finding.label) == (Decision.UNKNOWN, "INFRA")
    assert finding.head == "anchor: died of SIGSEGV"
    assert finding.candidate == ("throughput/b/seconds: 3 of 12 sessions with the anchor",)
    assert " /envs/anchor -m pytest " in finding.repro
    assert machine.gate(out, WITH_ANCHOR).findings == gate.findings, "judged again from gate.json"


def test_anchor_without_a_fault_shows_why_times_were_lost(machine: Machine, out: Path) -> None:
    machine.sides["anchor"].spoiled = 99
    (finding,) = machine.gate(out, WITH_ANCHOR).findings
    assert (finding.decision, finding.head) == (
        Decision.UNKNOWN,
        "anchor: throughput/b/seconds: not quiet",
    )


def test_budget_that_ends_sessions_of_the_anchor_is_shown(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds nothing, and --resume continues."""

    def fitting(tests: list[str], *_: object) -> list[str]:
        drifted = machine.bench and machine.bench.gate.drifted
        return [] if drifted and drifted.started == 3 else tests

    monkeypatch.setattr(pairing, "fitting", fitting)
    gate = machine.gate(out, WITH_ANCHOR, deadline=time.monotonic() + 1e6)
    (finding,) = gate.findings
    assert (gate.decision, finding.label) == (Decision.ADOPT, "NOT RUN")
    assert finding.head == "no drift is measured: the budget is spent"
    assert gate.undecided
    assert machine.gate(out, WITH_ANCHOR).findings == ()


def test_anchor_with_missing_sessions_gives_no_reading() -> None:
    few = [0.5] * (drift.SESSIONS - 1)
    before = {"a/b/s": [DriftReading(TODAY - timedelta(days=7), 0.04)]}
    assert find_drifts(before, "cpu", ["a/b/s"], {"a/b/s": few}, TODAY) == {}
    found = find_drifts(before, "cpu", ["a/b/s"], {"a/b/s": [*few, 0.5]}, TODAY)
    assert [drift.called for drift in found["a/b/s"]] == [TODAY]


def test_second_gate_of_a_day_replaces_its_reading() -> None:
    before = [DriftReading(TODAY - timedelta(days=days), 0.04) for days in (7, 0)]
    values = {"a/b/s": [0.0] * drift.SESSIONS}
    assert find_drifts({"a/b/s": before}, "cpu", ["a/b/s"], values, TODAY) == {}


def test_drift_is_reported_until_it_is_accepted(machine: Machine, tmp_path: Path) -> None:
    """Also if its readings are months old: the history is read for half a year."""
    old = [DriftReading(TODAY - timedelta(days=days), 0.04) for days in (120, 113)]

    def recent(lane: str, rows: Sequence[str], days: int) -> dict[str, list[DriftReading]]:
        return {row: [r for r in old if r.day >= TODAY - timedelta(days=days)] for row in rows}

    found = machine.gate(tmp_path / "gate", recent=recent)
    assert labels(found) == [("HOLD", "CREEP")]


def weeks(*log_ratios: float) -> list[DriftReading]:
    """Return a reading a week, the last one a week before TODAY."""
    days = range(-len(log_ratios), 0)
    return [DriftReading(TODAY + timedelta(weeks=n), x) for n, x in zip(days, log_ratios)]


def acceptance(ratio: float, since: date) -> Acceptance:
    return Acceptance("cpu", "a/b/s", None, "ann", "known", since, since + timedelta(days=365), ratio)


def ratios(readings: list[DriftReading], *entries: Acceptance) -> list[float]:
    """Return the largest change of each drift, in percent."""
    return [round(100 * math.log(d.ratio), 1) for d in successive_drifts(readings, entries)]


WEEKLY_STEP = (0.0, 0.04, 0.045, 0.04, 0.04)


def test_accepted_drift_does_not_hide_a_later_one() -> None:
    """Its own readings of the next month are no second drift; a change on top of it, or one of equal size later, is."""
    entry = acceptance(math.exp(0.045), TODAY - timedelta(weeks=9))
    after = weeks(*WEEKLY_STEP, *[0.0] * 7)
    assert ratios(after) == ratios(after, entry) == [4.5]
    assert ratios(weeks(*WEEKLY_STEP[:-1], 0.1, 0.1, 0.1, *[0.0] * 5), entry) == [4.5, 10]
    assert ratios(weeks(*WEEKLY_STEP, 0.0, 0.0, 0.0, 0.04, 0.04, 0.04, 0.04), entry) == [4.5, 4]


def test_drift_that_goes_on_is_reported_again() -> None:
    """1 % a week reads 4 % all the time."""
    entry = acceptance(1.04, TODAY - timedelta(weeks=10))
    assert ratios(weeks(*[0.04] * 6), entry) == [4]
    found = successive_drifts(weeks(*[0.04] * 12), [entry])
    assert [(TODAY - drift.called).days // 7 for drift in found] == [11, 4]


def test_accepted_drift_may_be_measured_again_with_noise() -> None:
    entry = acceptance(1.04, TODAY)
    assert ratios(weeks(0.04, 0.048, 0.04), entry) == [4.8]
    assert not covers(entry, Drift(TODAY, TODAY, 1.052))


@pytest.mark.parametrize(("days", "covered"), [(-9, True), (30, True), (31, False), (300, False)])
def test_acceptance_covers_no_drift_that_began_more_than_a_month_later(days: int, covered: bool) -> None:
    began = TODAY + timedelta(days=days)
    assert covers(acceptance(1.04, TODAY), Drift(began, began, 1.04)) is covered


@planted("C39", "a candidate whose processes crash in the sessions with the anchor")
def test_crash_in_the_sessions_with_the_anchor_holds(machine: Machine, tmp_path: Path) -> None:
    """The other sessions are complete, so that only the crashes hold the candidate."""
    original, dead = machine._timed, []

    def timed(name: str, side: Behaviour, record: Path) -> LaneRun:
        if name == "candidate" and machine.bench.gate.drifted is not None and len(dead) < 5:
            dead.append(name)
            return original(name, replace(side, signal=11), record)
        return original(name, side, record)

    machine._timed = timed  # type: ignore[method-assign]
    found = machine.gate(tmp_path / "gate", WITH_ANCHOR)
    assert (found.decision, labels(found)) == (Decision.HOLD, [("HOLD", "PROBLEM")])
