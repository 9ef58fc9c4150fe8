"""Slow drift: 1 % a week is reported by week 6, and a year without change gives no report.

A weekly reading is the estimate from 12 sessions, with the noise of tests/support/simulation.py.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core.accepted import Acceptance
from bumpgate.core.findings import Decision, DriftReading, TimedOutcome
from bumpgate.gate import command, drift, pairing, state
from bumpgate.gate.drift import Drift, anchor, covers, find_drift, find_drifts, successive_drifts
from bumpgate.gate.sequential import estimate
from bumpgate.gate.state import GateConfig
from bumpgate.process.runner import LaneRun
from bumpgate.review import accept
from suites.support.planted import planted
from tests.support.gating import TIME_ROW, TODAY, Behaviour, Machine, labels, written
from tests.support.simulation import NOISES, ROWS, rate_text, row_noise, wilson

FIXED = settings(derandomize=True, max_examples=60, deadline=None)
START = date(2026, 1, 5)
STEP = math.log(1.01)
POOL = 4000


def week(n: int) -> date:
    return START + timedelta(weeks=n)


def readings(log_ratios: Sequence[float]) -> list[DriftReading]:
    return [DriftReading(week(n), x) for n, x in enumerate(log_ratios, 1)]


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
    out = []
    for n in range(1, weeks + 1):
        back = anchor([week(k) for k in range(-8, n)], week(n))
        assert back
        out.append(STEP * (n - max(0, (back - START).days // 7)))
    return out


def quiet_runs(seed: int, noise: str, runs: int) -> int:
    """Count years without a report for any of 15 rows."""
    rng, errors = random.Random(seed), weekly_errors(noise)
    return sum(not any(find_drift(readings(rng.choices(errors, k=52))) for _ in ROWS) for _ in range(runs))


def found_by_week_6(noise: str, runs: int, log_ratios: Sequence[float]) -> int:
    """Count drifts reported by week 6."""
    rng, errors = random.Random(2), weekly_errors(noise)
    return sum(
        find_drift(readings([x + rng.choice(errors) for x in log_ratios])) is not None for _ in range(runs)
    )


@pytest.mark.parametrize("noise", NOISES)
def test_drift_of_1_percent_a_week_is_reported_and_no_change_is_not(noise: str) -> None:
    quiet, runs = quiet_runs(1, noise, 600), 2000
    assert wilson(quiet, 600)[0] >= 0.98, rate_text("quiet years", quiet, 600)
    hits = found_by_week_6(noise, runs, drifting(6))
    assert wilson(hits, runs)[0] >= 0.95, rate_text("reported by week 6", hits, runs)


def test_mutant_without_allowance_reports_false_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "ALLOWANCE", 0.0)
    assert wilson(quiet_runs(1, NOISES[0], 20), 20)[1] < 0.98


def test_mutant_that_reads_weekly_steps_fails_at_any_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this limit it is both too late and too noisy; a higher one reports later, a lower one more often."""
    monkeypatch.setattr(drift, "ALLOWANCE", 0.005)  # half of a step: its best value
    hits, quiet = found_by_week_6(NOISES[0], 300, [STEP] * 6), quiet_runs(2, NOISES[0], 100)
    assert wilson(hits, 300)[1] < 0.95, rate_text("reported by week 6", hits, 300)
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


def test_anchor_history_without_adopted_build_is_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.adoptions, "adopted", lambda lane: [])
    assert command._adopted_a_month_ago("cpu") == ""
    assert "no adopted build of lane cpu yet" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (readings([0.0, math.nan]), "log-ratio must be finite"),
        (readings([0.0, math.inf]), "log-ratio must be finite"),
        (readings([0.0, 0.0])[::-1], "in order of day"),
    ],
)
def test_readings_without_a_number_or_out_of_order_are_refused(
    series: list[DriftReading], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        find_drift(series)


# Drift over several gates, the month-old build that it is measured against, and accepted slowdowns.


WITH_ANCHOR = GateConfig("cpu", candidate="torch", anchor="torch==2.12.0")


def weeks(*log_ratios: float) -> list[DriftReading]:
    """Return a reading a week, the last one a week before TODAY."""
    days = range(-len(log_ratios), 0)
    return [DriftReading(TODAY + timedelta(weeks=n), x) for n, x in zip(days, log_ratios)]


def test_gates_report_1_percent_weekly_drift_by_week_6(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gate is 1 % slower than the last; the anchor is the build of four weeks before."""
    history: list[DriftReading] = []
    found = []
    for week in range(1, 7):
        machine.recent, machine.seed = {TIME_ROW: tuple(history)}, week
        slower = {"candidate": week, "adopted": week - 1, "anchor": max(0, week - 4)}
        for side, n in slower.items():
            machine.plant(side, slower={TIME_ROW: 1.01**n})
        day = TODAY + timedelta(weeks=week)
        monkeypatch.setattr("tests.support.gating.TODAY", day)
        out = tmp_path / f"week{week}"
        found.append(labels(machine.gate(out, WITH_ANCHOR)))
        history.append(DriftReading(day, written(out).readings[TIME_ROW]))
    assert ("HOLD", "CREEP") in found[-1], found
    assert ("HOLD", "CREEP") not in found[1], "two weeks are no drift yet"


def test_drift_from_history_holds_until_accepted(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bumpgate accept` takes its ratio from the gate, whose paired sessions read SAME."""
    machine.recent = {TIME_ROW: weeks(0.03, 0.04, 0.04, 0.04)}
    assert labels(machine.gate(out)) == [("HOLD", "CREEP")]
    monkeypatch.chdir(machine.root)
    monkeypatch.setattr(accept, "today", lambda: TODAY)
    who = {"owner": "ann", "reason": "known", "expires": str(TODAY + timedelta(days=9))}
    accept.command(TIME_ROW, "cpu", **who, record=out / state.NAME, other_tree=True)
    accepted = machine.gate(out.with_name("accepted"))
    assert (accepted.decision, len(accepted.accepted)) == (Decision.ADOPT, 1)


def write_acceptance(root: Path, ratio: float, expires: date) -> None:
    (root / "baselines").mkdir()
    (root / "baselines/accepted.toml").write_text(
        f'[[accepted]]\nlane = "cpu"\nrow = "{TIME_ROW}"\nratio = {ratio}\nowner = "ann"\n'
        f'reason = "known"\nsince = {expires - timedelta(days=30)}\nexpires = {expires}\n'
    )


def test_later_drift_of_an_accepted_row_holds(machine: Machine, out: Path) -> None:
    write_acceptance(machine.root, 1.05, TODAY + timedelta(days=9))
    machine.recent = {TIME_ROW: weeks(0.03, 0.04, 0.04, 0.04, 0.0, 0.0, 0.05, 0.07, 0.09, 0.1)}
    gate = machine.gate(out)
    assert (labels(gate), len(gate.accepted)) == ([("HOLD", "CREEP")], 1)
    assert gate.drifts[TIME_ROW].ratio > 1.07


@pytest.mark.parametrize(
    ("ratio", "days", "decision"),
    [(1.06, 1, Decision.ADOPT), (1.06, -1, Decision.HOLD), (1.01, 1, Decision.HOLD)],
    ids=["accepted", "expired", "slower than that"],
)
def test_accepted_slowdown_is_adopted_until_it_expires(
    machine: Machine, out: Path, ratio: float, days: int, decision: Decision
) -> None:
    machine.plant("candidate", slower={TIME_ROW: 1.06})
    write_acceptance(machine.root, ratio, TODAY + timedelta(days=days))
    gate = machine.gate(out)
    assert (gate.decision, gate.timed[TIME_ROW].outcome) == (decision, TimedOutcome.SLOWER)
    assert len(gate.accepted) == (ratio > 1.01)


ANCHORS = {
    "no import": ({"failure": "import torch: exit 1"}, "import torch: exit 1"),
    "crashes": ({"signal": 11, "dies_from": 3}, "anchor: died of SIGSEGV"),
    "no quiet moment": ({"spoiled": 99}, f"anchor: {TIME_ROW}: not quiet"),
}


@pytest.mark.parametrize("fault", ANCHORS)
def test_anchor_that_cannot_be_paired_is_unknown(machine: Machine, out: Path, fault: str) -> None:
    fields, head = ANCHORS[fault]
    machine.plant("anchor", **fields)
    gate = machine.gate(out, WITH_ANCHOR)
    (finding,) = gate.findings
    assert (finding.decision, finding.label, finding.head) == (Decision.UNKNOWN, "INFRA", head)
    if fault == "crashes":
        assert finding.candidate == (f"{TIME_ROW}: 3 of 12 sessions with the anchor",)
        assert " /envs/anchor -m pytest " in finding.repro
        assert machine.gate(out, WITH_ANCHOR).findings == gate.findings, "judged again from gate.json"


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
    before = {"a/b/s": weeks(0.04)}
    assert find_drifts(before, "cpu", ["a/b/s"], {"a/b/s": few}, TODAY) == {}
    found = find_drifts(before, "cpu", ["a/b/s"], {"a/b/s": [*few, 0.5]}, TODAY)
    assert [drift.called for drift in found["a/b/s"]] == [TODAY]


def test_second_gate_of_a_day_replaces_its_reading() -> None:
    before = [*weeks(0.04), DriftReading(TODAY, 0.04)]
    values = {"a/b/s": [0.0] * drift.SESSIONS}
    assert find_drifts({"a/b/s": before}, "cpu", ["a/b/s"], values, TODAY) == {}


def test_drift_is_reported_until_it_is_accepted(machine: Machine, out: Path) -> None:
    """Also if its readings are months old: the history is read for half a year."""
    machine.recent = {TIME_ROW: [DriftReading(TODAY - timedelta(days=days), 0.04) for days in (120, 113)]}
    assert labels(machine.gate(out)) == [("HOLD", "CREEP")]


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
    larger = acceptance(math.exp(0.09), TODAY - timedelta(weeks=9))
    assert ratios(weeks(*WEEKLY_STEP[:-1], 0.09, 0.09, 0.09, *[0.0] * 5), entry, larger) == [4.5], (
        "the larger of two acceptances counts"
    )
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
def test_crash_in_the_sessions_with_the_anchor_holds(machine: Machine, out: Path) -> None:
    """The other sessions are complete, so that only the crashes hold the candidate."""
    original, dead = machine._timed, []

    def timed(name: str, side: Behaviour, record: Path) -> LaneRun:
        if name == "candidate" and machine.bench and machine.bench.gate.drifted and len(dead) < 5:
            dead.append(name)
            return original(name, replace(side, signal=11), record)
        return original(name, side, record)

    machine._timed = timed  # type: ignore[method-assign]
    found = machine.gate(out, WITH_ANCHOR)
    assert (found.decision, labels(found)) == (Decision.HOLD, [("HOLD", "PROBLEM")])
