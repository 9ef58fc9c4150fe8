"""Near the end of a gate's budget: which tests a session still runs."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.gate import pairing, runner
from bumpgate.gate.options import GateConfig
from bumpgate.gate.pairing import Pace, fitting
from bumpgate.gate.plan import plan_for
from bumpgate.gate.timed import Sessions
from bumpgate.process.gpu_shares import divide
from bumpgate.process.home import save_durations
from bumpgate.process.runner import LaneCall, LaneRun
from tests.support.gating import Machine

TESTS = ("t::a", "t::b", "t::c", "t::d")
LONG_FIRST = {"t::a": 25.0, "t::b": 20.0, "t::c": 0.5, "t::d": 0.5}


@pytest.mark.parametrize(
    ("known", "left", "pace", "expected"),
    [
        (LONG_FIRST, 46.0, Pace(), "abcd"),
        (LONG_FIRST, 45.9, Pace(), "bcd"),
        (LONG_FIRST, 46.4, Pace(99.0, 0.5), "bcd"),
        (LONG_FIRST, 44.0, Pace(), "bcd"),
        (LONG_FIRST, 44.0, Pace(0.0, 20.0), "bcd"),
        (LONG_FIRST, 44.0, Pace(0.0, 43.0), "cd"),
        (LONG_FIRST, 44.0, Pace(0.0, 44.0), ""),
        (LONG_FIRST, 0.0, Pace(), ""),
        (LONG_FIRST, -1.0, Pace(), ""),
        ({"t::a": 25.0}, 27.0, Pace(1.0), "bcd"),
        ({"t::a": 25.0}, 28.0, Pace(1.0), "abcd"),
        ({}, 27.0, Pace(10.0, 5.0), "ab"),
        ({}, 9.0, Pace(10.0), ""),
        ({}, 1.0, Pace(), "abcd"),
        ({}, 0.0, Pace(), ""),
    ],
)
def test_session_runs_as_many_tests_as_fit(
    known: Mapping[str, float], left: float, pace: Pace, expected: str
) -> None:
    """A test without known seconds takes the mean; before the first session it costs nothing."""
    assert fitting(TESTS, known, left, pace) == [f"t::{x}" for x in expected]


def test_pace_is_the_slowest_of_the_sessions() -> None:
    first = Pace().after(TESTS, LONG_FIRST, 50.0)
    assert first == Pace(12.5, 4.0)
    assert first.after(["t::c", "t::d"], LONG_FIRST, 7.0) == Pace(12.5, 6.0)
    assert first.after(["t::a"], {}, 30.0) == Pace(30.0, 4.0), "seconds unknown"
    assert first.after(["t::a"], LONG_FIRST, 2.0) == first, "the process died"


class Clock:
    """A machine whose processes take OVERHEAD and the seconds of their tests, which they save as a lane run does."""

    OVERHEAD = 10.0

    def __init__(self, machine: Machine, lane: str, known: Mapping[str, float]) -> None:
        self.now, self.machine, self.lane, self.known = 0.0, machine, lane, known
        self.ran: list[list[str]] = []

    def monotonic(self) -> float:
        return self.now

    def run_lanes(self, calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        selected = [[part for part in call.selection if "::" in part] for call in calls]
        self.ran.append(selected[0])
        self.now += self.OVERHEAD + max(sum(LONG_FIRST[test] for test in tests) for tests in selected)
        if self.known:
            save_durations(self.lane, self.known)
        return self.machine.run_lanes(calls, timeout)

    def run_duet(self, calls: Sequence[LaneCall], flip: bool, timeout: float) -> list[LaneRun]:
        return self.run_lanes(calls, timeout)


def spend(
    machine: Machine,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    *,
    lane: str = "h200",
    gpus: Sequence[str] = (),
    known: Mapping[str, float] = LONG_FIRST,
) -> Clock:
    """Return what a gate of four tests ran, whose sessions of two processes take 112 s if they are complete."""
    monkeypatch.setenv("BUMPGATE_HOME", str(out / "home"))
    machine.rows = tuple(f"throughput/{test[-1]}/seconds" for test in TESTS)
    clock = Clock(machine, lane, known)
    monkeypatch.setattr(pairing, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(pairing, "run_duet", clock.run_duet)
    monkeypatch.setattr(runner, "run_lanes", clock.run_lanes)
    made = machine.prepare(
        out, GateConfig(lane, candidate="torch==2.14.0"), deadline=budget, shares=divide(gpus, 1, range(8))
    )
    sessions = Sessions(dict(zip(machine.rows, TESTS)), plan_for(), 72)
    made.gate = replace(made.gate, paired=sessions)
    pairing.TimedRuns(made.bench, made.gate).sessions(sessions, "adopted")
    return clock


@pytest.mark.parametrize("gpus", [(), ("0", "1")])
def test_last_session_ends_within_the_budget(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str]
) -> None:
    """After two sessions 76 s are left: the mean of 14 s would allow two tests, which take 110 s.

    The two short tests fit, then one of the long ones. Sessions at once take as long as one.
    """
    clock = spend(machine, out, monkeypatch, 300.0, gpus=gpus)
    assert clock.ran == [[*TESTS]] * 4 + [["t::b", "t::c", "t::d"]] * 2
    assert clock.now == 286.0
    assert "the budget is spent" in (out / "output.txt").read_text()


def test_processes_of_a_duet_count_once(machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = spend(machine, out, monkeypatch, 56.0 + 36.0, lane="cpu")
    assert clock.ran == [[*TESTS], ["t::b", "t::c", "t::d"]]
    assert clock.now == 87.0


def test_first_session_uses_the_seconds_of_the_lane_run(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its overhead is not known yet, the one that it may exceed the budget by."""
    monkeypatch.setenv("BUMPGATE_HOME", str(out / "home"))
    save_durations("h200", LONG_FIRST)
    clock = spend(machine, out, monkeypatch, 42.0)
    assert clock.ran == [["t::b", "t::c", "t::d"]] * 2
    assert clock.now == 62.0


def test_mean_decides_if_no_seconds_are_known(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = spend(machine, out, monkeypatch, 300.0, known={})
    assert clock.ran[4:] == [["t::a", "t::b"]] * 2
    assert clock.now == 334.0


def test_gate_without_a_budget_runs_every_open_test(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = spend(machine, out, monkeypatch, math.inf)
    assert clock.ran[:12] == [[*TESTS]] * 12, "no row is decided in 6 sessions"
    assert "the budget is spent" not in (out / "output.txt").read_text()
