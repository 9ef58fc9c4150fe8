"""A paired session on dedicated cores: two real processes in lockstep, and the case that one of them dies."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.gate.pairing import DUET_ROUNDS as ROUNDS
from bumpgate.gate.pairing import VARIABLE, run_duet, shares
from bumpgate.gate.sequential import log_ratio_of_rounds
from bumpgate.gate.timed import reading
from bumpgate.plugin.duet import Duet, _move
from bumpgate.plugin.rows import InfraError
from bumpgate.process.runner import LaneCall
from tests.support.project import PLUGINS, Project

TEST = "suites/throughput/test_work.py::test_work[cpu]"
# The clocks count steps: no load of the machine changes a cost. SLOWER lengthens the work of one side.
WORK = """
import statistics
from types import SimpleNamespace
from bumpgate.plugin import timing
from bumpgate.plugin.duet import partner

SECONDS = {"work": 1.0, "sleep": 0.0}
timing.FOREIGN_SHARE = float("inf")
timing._waited_seconds = lambda: 0.0
timing.time = SimpleNamespace(
    monotonic=time.monotonic, process_time=lambda: SECONDS["work"], perf_counter=lambda: sum(SECONDS.values())
)

@lanes("cpu")
def test_work(lane, row, exclusive_machine):
    if os.environ.get("DIES"):
        os._exit(3)
    cores = []
    def one():
        cores.append(sorted(os.sched_getaffinity(0)))
        SECONDS["work"] += 0.02 * float(os.environ.get("SLOWER", "1"))
        SECONDS["sleep"] += float(os.environ.get("SLEEPS", "0"))
    names = {os.environ.get("NAMED", "work"): one}
    timed = timing.interleaved(names, 40)
    (name,) = names
    seconds = sorted(timed.seconds[name])
    row.timed("throughput/loop/seconds", at(statistics.median(seconds), seconds[0], seconds[-1]), "s",
        seen=timed.quiet, rule="C37", tolerance=9.0, series=timed.paired_costs(name),
        evidence=[str(cores), str(bool(partner() and partner().leads)), str("BUMPGATE_DUET" in os.environ)])
    waits = timed.wall_over_cpu(name)
    row.timed("throughput/loop/wall_over_cpu", at(waits.median, waits.low, waits.high), "ratio", seen=timed.quiet,
        rule="C37", paired=True, series=timed.paired_waits(name))
"""
needs_two_cores = pytest.mark.skipif(not shares(), reason="a duet needs two cores")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.tests(WORK, "suites/throughput/test_work.py")
    return made


def duet(project: Project, flip: bool = False, length: int = ROUNDS, **of_second: str):
    """Run both sides of one session -> their runs. length: rounds of both."""
    shared = (
        PLUGINS
        | {"TMPDIR": str(project.root)}
        | ({"BUMPGATE_ROUNDS": str(length)} if length != ROUNDS else {})
    )
    calls = [
        LaneCall(
            Path(sys.executable),
            project.root,
            "cpu",
            ["-n", "0", TEST],
            project.root / f"{side}.json",
            environment=shared | more,
        )
        for side, more in (("adopted", {}), ("candidate", of_second))
    ]
    return run_duet(calls, flip, 120)


def rounds(runs, id: str = "throughput/loop/seconds"):
    """Return the costs of each side per round."""
    found = [reading(run, [TEST], [id]) for run in runs]
    assert all(id in each.rounds for each in found), [(run.code, each) for run, each in zip(runs, found)]
    return [each.rounds[id] for each in found]


def rows(run):
    assert run.record, run.failure
    return {j.row.id: j.row for j in run.record.judgements if not j.row.unmeasured}


@needs_two_cores
@pytest.mark.parametrize(("flip", "length"), [(False, ROUNDS), (True, 16)])
def test_duet_sides_share_rounds_and_swap_cores(project: Project, flip: bool, length: int) -> None:
    runs = duet(project, flip, length, SLOWER="1.5")
    adopted, candidate = (rows(run)["throughput/loop/seconds"] for run in runs)
    # The first call is not a round: it comes before both are ready.
    ours, theirs = (json.loads(row.evidence[0])[1:] for row in (adopted, candidate))
    assert len(ours) == length
    halves = shares()[::-1] if flip else shares()
    assert ours[:3] == [halves[1], halves[0], halves[1]]
    assert [place for places in zip(ours, theirs) for place in places] == [*halves[::-1], *halves] * (
        length // 2
    )
    assert (adopted.evidence[1:], candidate.evidence[1:]) == (("True", "False"), ("False", "False"))
    assert [len(costs) for costs in rounds(runs)] == [length, length]


@needs_two_cores
@pytest.mark.parametrize("flip", [False, True])
def test_duet_measures_the_ratio_of_work(project: Project, flip: bool) -> None:
    costs = rounds(duet(project, flip, SLOWER="1.5"))
    assert math.exp(log_ratio_of_rounds(*costs)) == pytest.approx(1.5)


@needs_two_cores
@pytest.mark.parametrize("sleeps", ["0", "0.002"])
def test_duet_measures_waiting_outside_cpu_time(project: Project, sleeps: str) -> None:
    """A sleep of 2 ms next to 20 ms of work is reported as its share of CPU time; without it there is no wait."""
    runs = duet(project, SLEEPS=sleeps)
    waits = math.exp(log_ratio_of_rounds(*rounds(runs, "throughput/loop/wall_over_cpu")))
    assert waits == pytest.approx(1 + float(sleeps) / 0.02)


@needs_two_cores
def test_dead_side_ends_the_wait_of_the_other(project: Project) -> None:
    alone, dead = duet(project, DIES="1")
    assert dead.record is None or not rows(dead)
    found = reading(alone, [TEST], [])
    assert not found.costs
    assert "the other side of this session has ended" in found.lost


@needs_two_cores
def test_sides_timing_different_work_are_not_paired(project: Project) -> None:
    for run in duet(project, NAMED="other"):
        assert "the two sides of this session differ in what they time" in reading(run, [TEST], []).lost


PLACES = """
import json, os, subprocess, sys, time
seen = [sorted(os.sched_getaffinity(0))]
while len(seen) < 4:
    if (own := sorted(os.sched_getaffinity(0))) != seen[-1]:
        seen.append(own)
    time.sleep(0.01)
child = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
place = json.loads(subprocess.run(child, capture_output=True, text=True).stdout)
print(json.dumps([seen, place]))
"""


@needs_two_cores
def test_started_processes_change_places_together() -> None:
    """Each side's processes are on one half of the cores at a time, and never both on the same one for long."""
    links, halves = socket.socketpair(), shares()
    before, sides = os.sched_getaffinity(0), []
    try:
        for link, cores, leads in zip(links, (halves, halves[::-1]), (True, False)):
            side = Duet(link, cores, leads)
            with side.children_change_places():
                done = subprocess.run(
                    [sys.executable, "-c", PLACES], capture_output=True, text=True, check=True
                )
            sides.append(json.loads(done.stdout))
            assert os.sched_getaffinity(0) == {*cores[0]}, "the waiting process stays"
    finally:
        os.sched_setaffinity(0, before)
    for seen, place in sides:
        assert all(a != b for a, b in itertools.pairwise(seen))
        assert [own for own in [*seen, place] if own not in halves] == []


@pytest.mark.parametrize(
    ("mask", "moved"),
    [({0, 1, 2, 3}, {2, 3}), ({0, 1}, {2, 3}), ({1}, {3}), ({3}, {3}), ({7}, {2, 3})],
    ids=str,
)
def test_pinned_thread_stays_pinned(mask: set[int], moved: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that pins all of its threads to one core must not be given a half of them by the session."""
    masks: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: mask)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: masks.append({*cores}))
    _move(os.getpid(), [2, 3], [[0, 1], [2, 3]])
    assert masks
    assert all(given == moved for given in masks)


def test_sides_at_different_places_take_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """One side's test ended early, and its next one sends something else: a fault of neither side."""
    links, before = socket.socketpair(), os.sched_getaffinity(0)
    try:
        one, other = (Duet(link, [[*before], [*before]], leads) for link, leads in zip(links, (True, False)))
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_next (call)")
        other.link.sendall(b'["test_it.py::test_next: what they start", "start"]\n')
        assert one.exchange("start", "what they start") == "start"
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_first (call)")
        other.link.sendall(b'["test_it.py::test_next: what they start", "start"]\n')
        with pytest.raises(
            InfraError, match=r"different places: test_it\.py::test_first: its CPU seconds and"
        ):
            one.exchange(0.5, "its CPU seconds")
    finally:
        os.sched_setaffinity(0, before)
        for link in links:
            link.close()


def test_moves_of_both_sides_follow_one_clock() -> None:
    """At any moment the two sides move their processes to different cores."""
    cores = [[0], [1]]
    for now in (0.0, 0.26, 10.01, 1234.55):
        one, other = (Duet.cores_at(side, now) for side in (cores, cores[::-1]))
        assert one != other
    assert Duet.cores_at(cores, 0.01) != Duet.cores_at(cores, 0.26)


def test_no_series_is_kept_outside_a_duet(project: Project) -> None:
    assert VARIABLE not in os.environ
    project.pytest("-m", "cpu", "-n", "0", TEST.partition("::")[0], TMPDIR=str(project.root))
    (row,) = (j.row for j in project.record().judgements if j.row.id == "throughput/loop/seconds")
    assert row.series == {}


def test_unpaired_rounds_are_refused() -> None:
    for adopted, candidate in (
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((1.0, math.inf), (1.0, 2.0)),
        ((0.0,), (1.0,)),
    ):
        with pytest.raises(ValueError, match="do not pair"):
            log_ratio_of_rounds(adopted, candidate)


def test_slow_core_cancels_in_swapped_rounds() -> None:
    """The first core is slower by half; the sides swap cores after each round, and one round is disturbed."""
    cores = [1.5, 1.0] * 10
    adopted = [2.0 * a for a in cores]
    candidate = [2.1 * b for b in (cores[1:] + cores[:1])]
    candidate[4] *= 3
    assert math.exp(log_ratio_of_rounds(adopted, candidate)) == pytest.approx(1.05, rel=1e-9)
