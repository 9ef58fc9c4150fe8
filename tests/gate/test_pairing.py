"""Paired sessions near the end of a budget, on several GPUs, and on compile caches that must be filled."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.baseline import load, save
from bumpgate.core.findings import Decision
from bumpgate.gate import pairing, runner
from bumpgate.gate.pairing import Pace, balanced, fitting
from bumpgate.gate.plan import plan_for
from bumpgate.gate.state import GateConfig
from bumpgate.gate.timed import Sessions, TimedReading
from bumpgate.process.gpu_shares import divide
from bumpgate.process.home import save_durations
from bumpgate.process.runner import LaneCall, LaneRun
from bumpgate.process.tree_digest import Binding
from tests.support.gate_tree import Tree
from tests.support.gating import TIME_ROW, Machine, PreparedGate, labels

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


def test_fill_gives_each_process_similar_times() -> None:
    known = {"a": 50.0, "b": 20.0, "c": 20.0, "d": 10.0}
    assert balanced(["d", "c", "b", "a"], known, 2) == [["a"], ["c", "b", "d"]]
    assert balanced(["x", "y", "z"], {}, 2) == [["x", "z"], ["y"]]
    assert balanced(["new", "d"], known, 3) == [["new"], ["d"], []], "a new test takes the mean, 25 s"


class Clock:
    """A machine whose processes take OVERHEAD and the seconds of their tests, which they save as a lane run does."""

    OVERHEAD = 10.0

    def __init__(self, machine: Machine, lane: str, known: Mapping[str, float]) -> None:
        self.now, self.machine, self.lane, self.known = 0.0, machine, lane, known
        self.ran: list[list[str]] = []

    def run_lanes(self, calls: Sequence[LaneCall], *_: object) -> list[LaneRun]:
        selected = [[part for part in call.selection if "::" in part] for call in calls]
        self.ran.append(selected[0])
        self.now += self.OVERHEAD + max(sum(LONG_FIRST[test] for test in tests) for tests in selected)
        if self.known:
            save_durations(self.lane, self.known)
        return self.machine.run_lanes(calls, 1.0)


ALL, SHORT, PART = [*TESTS], ["t::b", "t::c", "t::d"], ["t::a", "t::b"]
# Budget, lane, GPUs, seconds known before, seconds saved -> what the processes ran, and when they ended.
SPENT: dict[str, tuple[Any, ...]] = {
    # After two sessions 76 s are left: the mean of 14 s would allow two tests, which take 110 s. The two short tests
    # fit, then one of the long ones.
    "on one GPU": (300.0, "h200", (), {}, LONG_FIRST, [ALL] * 4 + [SHORT] * 2, 286.0),
    "sessions at once take as long as one": (
        *(300.0, "h200", ("0", "1"), {}, LONG_FIRST, [ALL] * 4 + [SHORT] * 2, 286.0),
    ),
    "processes of a duet count once": (92.0, "cpu", (), {}, LONG_FIRST, [ALL, SHORT], 87.0),
    # Its overhead is not known yet, the one that it may exceed the budget by.
    "first session uses the seconds of the lane run": (
        *(42.0, "h200", (), LONG_FIRST, LONG_FIRST, [SHORT] * 2, 62.0),
    ),
    "mean decides if no seconds are known": (300.0, "h200", (), {}, {}, [ALL] * 4 + [PART] * 2, 334.0),
}


def spend(
    machine: Machine,
    out: Path,
    patch: pytest.MonkeyPatch,
    budget: float,
    lane: str = "h200",
    gpus: Sequence[str] = (),
    before: Mapping[str, float] = {},
    known: Mapping[str, float] = LONG_FIRST,
) -> Clock:
    """Return what a gate of four tests ran, whose sessions of two processes take 112 s if they are complete."""
    patch.setenv("BUMPGATE_HOME", str(out / "home"))
    if before:
        save_durations(lane, before)
    machine.rows = tuple(f"throughput/{test[-1]}/seconds" for test in TESTS)
    clock = Clock(machine, lane, known)
    patch.setattr(pairing, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    patch.setattr(pairing, "run_duet", clock.run_lanes)
    patch.setattr(runner, "run_lanes", clock.run_lanes)
    config, shares = GateConfig(lane, candidate="torch==2.14.0"), divide(gpus, 1, range(8))
    made = machine.prepare(out, config, deadline=budget, shares=shares)
    sessions = Sessions(dict(zip(machine.rows, TESTS)), plan_for(), 72)
    made.gate = replace(made.gate, paired=sessions)
    pairing.TimedRuns(made.bench, made.gate).sessions(sessions, "adopted")
    return clock


@pytest.mark.parametrize("name", SPENT)
def test_last_session_ends_within_the_budget(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    *given, ran, ended = SPENT[name]
    clock = spend(machine, out, monkeypatch, *given)
    assert (clock.ran, clock.now) == (ran, ended)
    assert "the budget is spent" in (out / "output.txt").read_text()


def test_gate_without_a_budget_runs_every_open_test(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = spend(machine, out, monkeypatch, math.inf)
    assert clock.ran[:12] == [ALL] * 12, "no row is decided in 6 sessions"
    assert "the budget is spent" not in (out / "output.txt").read_text()


# A gate with several GPUs: both sides' lanes at once, then as many sessions as there are GPUs.


ON_GPU = GateConfig("h200", candidate="torch==2.14.0")
FOUR = divide(["0", "1", "2", "3"], 1, range(8))
BOTH = ("adopted", "candidate")


class Calls:
    """Lane runs by the time they start together. dying: names of the records of those that die."""

    def __init__(self, machine: Machine) -> None:
        self.at_once: list[list[LaneCall]] = []
        self.machine = machine
        self.dying: set[str] = set()

    def run(self, calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        self.at_once.append([*calls])
        runs = self.machine.run_lanes(calls, timeout)
        dead = [call.record.name in self.dying for call in calls]
        return [replace(run, record=None, failure="died") if d else run for run, d in zip(runs, dead)]

    def table(self, *variables: str) -> list[list[tuple[str, ...]]]:
        """Return the side and these env_vars of each call."""
        return [
            [(call.python.name, *(call.environment.get(name, "") for name in variables)) for call in calls]
            for calls in self.at_once
        ]

    def records(self) -> list[list[str]]:
        return [[call.record.name for call in calls] for calls in self.at_once]


@pytest.fixture
def calls(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls(machine)
    monkeypatch.setattr(runner, "run_lanes", made.run)
    return made


def test_lanes_and_sessions_run_at_once_on_their_gpus(calls: Calls, machine: Machine, out: Path) -> None:
    """Sessions have the orders AB, BA, BA, AB and the caches that they would have one after the other."""
    gate = machine.gate(out, ON_GPU, shares=FOUR)
    assert gate.decision is Decision.ADOPT
    both = [("adopted", "0,1", "[0, 1, 2, 3]"), ("candidate", "2,3", "[4, 5, 6, 7]")]
    assert calls.table("CUDA_VISIBLE_DEVICES", "BUMPGATE_SHARE")[:2] == [both, both], "canaries, lane"
    first, second, *later = calls.table("CUDA_VISIBLE_DEVICES")[2:]
    assert first == [("adopted", "0"), ("candidate", "1"), ("candidate", "2"), ("adopted", "3")]
    assert second == [("candidate", "0"), ("adopted", "1"), ("adopted", "2"), ("candidate", "3")]
    assert later == [first, second], "SAME after 8 sessions"
    assert gate.paired is not None
    assert (gate.paired.started, [len(x) for x in gate.paired.log_ratios.values()]) == (8, [8])
    assert calls.records()[2] == [
        *("timed-adopted-0.json", "timed-candidate-1.json", "timed-candidate-2.json", "timed-adopted-3.json")
    ]


def test_lanes_on_three_gpus_have_equal_machines(calls: Calls, machine: Machine, out: Path) -> None:
    """The third GPU is idle until the sessions, each of which runs on one GPU."""
    machine.gate(out, ON_GPU, shares=divide(["0", "1", "2"], 1, range(24)))
    found = calls.table("CUDA_VISIBLE_DEVICES", "BUMPGATE_SHARE")
    both = [("adopted", "0", str([*range(8)])), ("candidate", "1", str([*range(8, 16)]))]
    assert found[:2] == [both, both]
    assert [call[1] for call in found[2]] == ["0", "1", "2"]


def test_two_gpus_of_a_lane_that_needs_two_are_one_share(calls: Calls, machine: Machine, out: Path) -> None:
    machine.gate(out, ON_GPU, shares=divide(["0", "1"], 2, range(4)))
    found = calls.table("CUDA_VISIBLE_DEVICES")
    assert found[2:4] == [[("adopted", "0,1")], [("candidate", "0,1")]], "one side after the other"


def test_slower_row_is_held_on_several_gpus(machine: Machine, out: Path) -> None:
    machine.plant("candidate", slower={TIME_ROW: 1.05})
    assert labels(machine.gate(out, ON_GPU, shares=FOUR)) == [("HOLD", "SLOWER")]


def with_two_caches(machine: Machine, out: Path) -> PreparedGate:
    made = machine.prepare(out, ON_GPU, shares=FOUR)
    for name, spec in made.environments.items():
        made.environments[name] = replace(spec, more=(machine.caches(f"{name} 2"),))
    return made


def test_further_caches_are_filled_by_all_gpus(calls: Calls, machine: Machine, out: Path) -> None:
    """Four processes on each GPU run a part of the tests of one side; a session uses the pair of its number."""
    made = with_two_caches(machine, out)
    for spec in made.environments.values():
        spec.mark_filled(0, None)
    sessions = Sessions({f"a/{i}/s": f"t.py::test_{i}" for i in range(9)}, None, 2, cache_pairs=2)
    calls.dying = {"warm-adopted-1-0.json", "warm-adopted-1-2.json"}
    pairing.TimedRuns(made.bench, made.gate).warm(sessions)
    variables = ("CUDA_VISIBLE_DEVICES", "CACHE", "BUMPGATE_ROUNDS", "BUMPGATE_UNTIMED")
    expected = [("adopted", gpu, "adopted 2", "1", "1") for gpu in ("0", "1") * 4]
    expected += [("candidate", gpu, "candidate 2", "1", "1") for gpu in ("2", "3") * 4]
    assert calls.table(*variables) == [expected]
    selections = [[test[-1] for test in call.selection[2:]] for call in calls.at_once[0]]
    assert selections == [["0", "8"], *([str(i)] for i in range(1, 8))] * 2
    printed = (out / "output.txt").read_text()
    lost = "6 of 8 processes ended, not: warm-adopted-1-0.log, warm-adopted-1-2.log\n"
    assert re.search(f"adopted: compile cache 2 filled; [0-9]+ s; {lost}", printed)
    assert re.search("candidate: compile cache 2 filled; [0-9]+ s\n", printed)
    calls.at_once.clear()
    pairing.TimedRuns(made.bench, made.gate).sessions(sessions, "adopted")
    caches = calls.table("CACHE", "BUMPGATE_UNTIMED", "BUMPGATE_SESSION")[0]
    rows = out / "paired_rows.json"
    assert json.loads(rows.read_text()) == [f"a/{i}/s" for i in range(9)]
    names = ("adopted", "candidate 2", "candidate", "adopted 2")
    assert [call[1:] for call in caches] == [(cache, "", str(rows)) for cache in names]


def test_resumed_gate_fills_all_caches_at_once(calls: Calls, machine: Machine, out: Path) -> None:
    """On another machine both pairs are empty."""
    made = with_two_caches(machine, out)
    sessions = Sessions({"a/0/s": "t.py::test_0", "a/1/s": "t.py::test_1"}, None, 2, cache_pairs=2)
    pairing.TimedRuns(made.bench, made.gate).warm(sessions)
    gpus = {"adopted": ("0", "1"), "candidate": ("2", "3")}
    expected = [(name, gpu, name + more) for name in gpus for more in ("", " 2") for gpu in gpus[name]]
    assert calls.table("CUDA_VISIBLE_DEVICES", "CACHE") == [expected]
    assert calls.records()[0][:4] == [f"warm-adopted-{i}-{j}.json" for i in (0, 1) for j in (0, 1)]
    assert all(spec.is_filled(pair, None) for spec in made.environments.values() for pair in (0, 1))


def test_resumed_gate_fills_the_caches_of_another_machine(calls: Calls, machine: Machine, out: Path) -> None:
    """It also fills caches again that another work tree filled."""
    machine.gate(out, ON_GPU, deadline=0.0)
    calls.at_once.clear()
    for name in BOTH:
        machine.prepare(out, ON_GPU).environments[name].mark_filled(0, Binding("1", "another tree"))
    gate = machine.gate(out, ON_GPU)
    steps = [[f"{step}.json".format(side)] for step in ("warm-{}-0-0", "timed-{}-0") for side in BOTH]
    assert calls.records()[:4] == steps
    assert (out / "output.txt").read_text().count("compile cache 1 filled") == 2
    assert gate.decision is Decision.ADOPT


@pytest.mark.long(40)
def test_command_uses_all_gpus_of_the_host(tree: Tree) -> None:
    """End to end with real processes on a lane of one GPU, and the refusal of a GPU named twice."""
    root = tree.root
    cuda = "class cuda:\n    get_device_name = lambda _: 'NVIDIA H200'\n    get_device_capability = lambda _: (9, 0)\n"
    tree.write("torch/__init__.py", cuda)
    place = (
        "print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['SIDE'], sep=' ', file=open('gpus', 'a'))"
    )
    for path in (root / "suites").rglob("test_*.py"):
        text = path.read_text().replace('@lanes("cpu")', '@lanes("cpu", "h200")')
        path.write_text(text.replace("    for case, factor", f"    {place}\n    for case, factor"))
    cpu = load(root / "baselines/cpu.json", "cpu")
    rows = {id: replace(row, test=row.test.replace("cpu", "h200")) for id, row in cpu.rows.items()}
    save(root / "baselines/h200.json", replace(cpu, lane="h200", rows=rows))
    sides = ("--python-adopted", str(tree.adopted), "--python-candidate", str(tree.candidate), "--out", "g")
    ran = tree.bumpgate("gate", "--lane", "h200", *sides, "--gpus", "4,7", "--sessions", "6")
    assert ran.code == Decision.ADOPT.value, ran.out + ran.err
    lines = (root / "gpus").read_text().splitlines()
    lanes_of, fill, *sessions = [sorted(lines[i : i + 2]) for i in range(0, len(lines), 2)]
    one, other = ["4 adopted", "7 candidate"], ["4 candidate", "7 adopted"]
    assert (lanes_of, fill) == (one, one), "the lanes, and the second pair of caches"
    assert sessions == [one, other, other, one, one, other]
    assert tree.raw()["sessions"]["started"] == 6
    refused = tree.bumpgate("gate", "--lane", "h200", *sides, "--gpus", "0,0")
    message = "bumpgate: --gpus 0,0: name each GPU once, such as --gpus 0,1,2,3, or --gpus all"
    assert (refused.code, refused.err.strip()) == (4, message)


def test_lost_process_ends_only_its_session() -> None:
    """Of two sessions at once, the second loses its first process; its other one is not started."""
    sessions = Sessions({"a/b/s": "t"}, None, 6)
    asked = []

    def processes(calls: Sequence[tuple[int, str, Sequence[str]]]) -> list[TimedReading]:
        asked.append([(i, side) for i, side, _ in calls])
        return [TimedReading(lost="died") if i else TimedReading({"a/b/s": 2.0}) for i, _, _ in calls]

    sessions.run_several(processes, 2)
    assert asked == [[(0, "adopted"), (1, "candidate")], [(0, "candidate")]]
    assert (sessions.log_ratios, sessions.started) == ({"a/b/s": [0.0]}, 2)
    lost = {"t": {"adopted": 0, "candidate": 1}}
    assert (sessions.lost, sessions.lost_processes) == ("candidate: died", lost)
