"""Paired sessions of a gate: timed tests of both sides, at once on a CPU and in turn on a GPU.

On a CPU each side has a share of the cores (bumpgate/plugin/duet.py runs in both). A busy neighbour on a shared machine
slows everything else: within three minutes the CPU time of one training step varied from 155 to 235 ms, almost equally
in two processes at the same time. Run at once, both sides slow down alike.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from bumpgate.core.findings import TimedOutcome
from bumpgate.core.rows import write_atomic
from bumpgate.gate.environments import ROUNDS, SIDES, TEST_SECONDS
from bumpgate.gate.runner import Bench
from bumpgate.gate.sequential import decide
from bumpgate.gate.state import Gate
from bumpgate.gate.timed import Sessions, TimedReading, reading
from bumpgate.process.gpu_shares import SESSION, UNTIMED, GpuShare
from bumpgate.process.home import load_durations
from bumpgate.process.runner import LaneCall, LaneRun, run_lanes

VARIABLE = "BUMPGATE_DUET"
# Rounds that each process of a duet times: enough that few of them are disturbed by a neighbour.
DUET_ROUNDS = 30
# Processes that fill one compile cache on one GPU at the same time. Its tests of large models claim the GPU's memory.
FILLS_AT_ONCE = 4
# Rows that the sessions pair: too many for a variable in a large lane.
PAIRED = "paired_rows.json"


def shares() -> list[list[int]]:
    """Return the cores of this process in two halves; empty if there is a single core, or they cannot be queried."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return [cores[:half], cores[half : 2 * half]] if half else []


def run_duet(calls: Sequence[LaneCall], flip: bool, timeout: float | None) -> list[LaneRun]:
    """Run two lanes at once, synchronized over a socket.

    flip: the first of them starts on the cores of the second. A call's own $BUMPGATE_ROUNDS overrides DUET_ROUNDS.
    """
    links = [end.detach() for end in socket.socketpair()]
    halves = shares()[::-1] if flip else shares()
    both = []
    for call, link, cores, leads in zip(calls, links, (halves, halves[::-1]), (True, False)):
        settings = json.dumps({"socket": link, "cores": cores, "leads": leads})
        variables = {"BUMPGATE_ROUNDS": str(DUET_ROUNDS), **call.environment, VARIABLE: settings}
        both.append(replace(call, environment=variables, keep_open=(link,)))
    return run_lanes(both, timeout)


@dataclass(frozen=True)
class TimedRuns:
    """Runs the timed tests of one gate. options: of pytest, as in the run of the selection."""

    bench: Bench
    gate: Gate
    options: Sequence[str] = ()

    def warm(self, sessions: Sessions) -> None:
        """Fill the compile caches that are still empty with the timed tests; the run of the selection fills the first.

        With several shares of the machine, each runs a part of the tests of one side. On a GPU, FILLS_AT_ONCE processes
        share it for each empty cache, since most of their time is compiling and nothing uses their times.
        """
        tests, specs, tree = sessions.open_tests(), self.bench.environments, self.gate.binding
        pairs = range(sessions.cache_pairs if tests else 0)
        for at_once in [pairs] if self._on_cuda else [[pair] for pair in pairs]:
            empty = {name: [p for p in at_once if not specs[name].is_filled(p, tree)] for name in SIDES}
            for names in self.bench.groups([name for name in SIDES if empty[name]]):
                self._fill({name: empty[name] for name in names}, tests)
                for name in names:
                    for pair in empty[name]:
                        specs[name].mark_filled(pair, tree)
        sessions.warm = True
        self.bench.save(self.gate)

    @property
    def _on_cuda(self) -> bool:
        return self.bench.lane.device == "cuda"

    def _fill(self, empty: Mapping[str, Sequence[int]], tests: Sequence[str]) -> None:
        """Fill these pairs of compile caches at once. empty: side -> its pairs."""
        calls: dict[tuple[str, int], list[LaneCall]] = {}
        known = load_durations(self.bench.config.lane)
        more = {UNTIMED: "1"} if self._on_cuda else {}
        for (name, pairs), own in zip(empty.items(), self.bench.shares_of(len(empty))):
            places = [*(own or (None,))] * (FILLS_AT_ONCE if self._on_cuda else 1)
            for pair in pairs:
                calls[name, pair] = [
                    self._process(name, some, f"warm-{name}-{pair}-{i}.json", pair, 1, share, more)
                    for i, (share, some) in enumerate(zip(places, balanced(tests, known, len(places))))
                    if some
                ]
        numbers = " and ".join(str(pair + 1) for pair in sorted({pair for _, pair in calls}))
        what, every = f"compile cache {numbers}", [*chain(*calls.values())]
        runs = iter(self.bench.run_calls([*empty], what, every, TEST_SECONDS * len(tests)))
        for (name, pair), own_calls in calls.items():
            own_runs = [next(runs) for _ in own_calls]
            spent = max(run.seconds for run in own_runs)
            ended = [bool(not run.failure and run.record and run.record.complete) for run in own_runs]
            lost = ", ".join(run.log.name for run, whole in zip(own_runs, ended) if not whole)
            lost = lost and f"; {sum(ended)} of {len(ended)} processes ended, not: {lost}"
            self.bench.view.say(f"{name}: compile cache {pair + 1} filled; {spent:.0f} s{lost}")

    def sessions(self, sessions: Sessions, other: str) -> None:
        """Run sessions of the candidate and `other` until every row is decided or the budget is spent.

        Near the deadline a session runs as many of the open tests as still fit.
        """
        say, before, longest, pace = self.bench.view.say, sessions.started, 0.0, Pace()
        lane, in_turn = self.bench.config.lane, 1 if self._at_once() else 2
        with self.bench.view.doing("") as update:
            while tests := sessions.open_tests():
                started = time.monotonic()
                left = self.bench.deadline - started
                if left < math.inf:
                    tests = fitting(tests, load_durations(lane), left / in_turn, pace)
                if left <= 0 or not tests:
                    say("the budget is spent: rows that are still open stay INCONCLUSIVE")
                    break
                update(f"{other} and candidate: {_progress(sessions)}")
                quarter = sessions.started // 4
                self._session(sessions, other, tests)
                took = time.monotonic() - started
                longest, pace = max(longest, took), pace.after(tests, load_durations(lane), took / in_turn)
                self.bench.save(self.gate)
                if sessions.started // 4 > quarter:
                    say(f"{other} and candidate: {_progress(sessions)}; the longest took {longest:.0f} s")
        if sessions.started > before and sessions.plan:
            outcomes = [*decide(sessions.log_ratios, sessions.plan, sessions.family).values()]
            counts = [f"{outcomes.count(o)} {o.value}" for o in TimedOutcome if o in outcomes]
            line = f"timed rows after {sessions.started} sessions: {', '.join(counts) or 'none'}"
            say(f"{line}; last lost: {sessions.lost}" if sessions.lost else line)

    def _at_once(self) -> bool:
        """Return whether the processes of a session run at once: if each can have its own cores."""
        return self.bench.lane.device == "cpu" and bool(shares())

    def _session(self, sessions: Sessions, other: str, tests: Sequence[str]) -> None:
        """Run one session: both sides at once, or one after the other (GPU).

        With several shares of the machine, run as many sessions at once, each on one share.
        """
        path = self.bench.out.absolute() / PAIRED
        write_atomic(path, json.dumps([*sessions.tests]) + "\n")
        of_rows, own = {SESSION: str(path)}, self.bench.shares or (None,)

        def duet(nodes: Sequence[str], flip: bool) -> tuple[TimedReading, TimedReading]:
            rounds, pair = ROUNDS if sessions.only_slow_modes_open else DUET_ROUNDS, sessions.cache
            calls = [
                self._process(name, nodes, f"timed-{name}.json", pair, rounds, more=of_rows)
                for name in (other, "candidate")
            ]
            runs = run_duet(calls, flip, TEST_SECONDS * len(nodes))
            adopted, candidate = (reading(run, nodes, sessions.tests) for run in runs)
            return adopted, candidate

        def in_turn(processes: Sequence[tuple[int, str, Sequence[str]]]) -> list[TimedReading]:
            names = [side if side == "candidate" else other for _, side, _ in processes]
            calls = [
                self._process(
                    name, nodes, f"timed-{name}-{i}.json", sessions.cache_after(i), ROUNDS, own[i], of_rows
                )
                for name, (i, _, nodes) in zip(names, processes)
            ]
            timeout = TEST_SECONDS * max(len(nodes) for _, _, nodes in processes)
            runs = self.bench.run_calls(sorted(set(names)), "timed processes", calls, timeout)
            return [reading(run, nodes, sessions.tests) for run, (_, _, nodes) in zip(runs, processes)]

        if self._at_once():
            sessions.run_duet(duet, tests)
        else:
            sessions.run_several(in_turn, len(own), tests)

    def _process(
        self,
        name: str,
        tests: Sequence[str],
        record: str,
        pair: int,
        rounds: int,
        share: GpuShare | None = None,
        more: Mapping[str, str] = {},
    ) -> LaneCall:
        env_vars = {"BUMPGATE_ROUNDS": str(rounds), **more}
        return self.bench.call(name, [*self.options, "-n", "0", *tests], record, pair, env_vars, share)


def _progress(sessions: Sessions) -> str:
    """Format the progress of the sessions: `8 sessions of at most 32; 2 of 3 rows open`."""
    rows, still = len(sessions.tests), len(sessions.open_rows())
    return f"{sessions.started} sessions of at most {sessions.limit}; {still} of {rows} rows open"


def balanced(tests: Sequence[str], known: Mapping[str, float], count: int) -> list[list[str]]:
    """Return `count` lists of these tests that take similar times: the longest first, each to the shortest list.

    known: node id -> seconds of a test; one without takes their mean.
    """
    mean = math.fsum(known.values()) / len(known) if known else 1.0
    lists: list[list[str]] = [[] for _ in range(count)]
    spent = [0.0] * count
    for test in sorted(tests, key=lambda test: -known.get(test, mean)):
        i = spent.index(min(spent))
        lists[i].append(test)
        spent[i] += known.get(test, mean)
    return lists


@dataclass(frozen=True)
class Pace:
    """Wall seconds of a process, the maximum over the sessions so far; 0 before the first session.

    mean: of one process, for each of its tests. overhead: of one process outside of its tests: start-up and imports.
    """

    mean: float = 0.0
    overhead: float = 0.0

    def after(self, tests: Sequence[str], seconds: Mapping[str, float], process: float) -> Pace:
        """Return the pace after a session of these tests. seconds: node id -> those of a test, if known.

        process: wall seconds of one process.
        """
        outside = process - sum(seconds.get(test, math.inf) for test in tests)
        return Pace(max(self.mean, process / len(tests)), max(self.overhead, outside))


def fitting(tests: Sequence[str], seconds: Mapping[str, float], left: float, pace: Pace) -> list[str]:
    """Return the tests that one process can run in the `left` seconds, in the order of `tests`: as many as possible.

    The shortest are chosen first. seconds: node id -> those of a test; one without takes the mean. If none has them,
    the mean includes the overhead.
    """
    if left <= 0:
        return []
    left -= pace.overhead if any(test in seconds for test in tests) else 0.0
    chosen = set()
    for test in sorted(tests, key=lambda test: seconds.get(test, pace.mean)):
        left -= seconds.get(test, pace.mean)
        if left < 0:
            break
        chosen.add(test)
    return [test for test in tests if test in chosen]
