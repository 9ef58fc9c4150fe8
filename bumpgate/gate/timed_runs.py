"""Paired sessions of a gate: timed tests of both sides, at once on a CPU and in turn on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bumpgate.core import lanes
from bumpgate.gate.duet import ROUNDS as DUET_ROUNDS
from bumpgate.gate.duet import run_duet, shares
from bumpgate.gate.sequential import decide
from bumpgate.gate.sides import ROUNDS, TEST_SECONDS, TITLES
from bumpgate.gate.timed import Sessions, TimedReading, reading
from bumpgate.gate.view import session_line, timed_line
from bumpgate.run.runner import LaneCall

if TYPE_CHECKING:
    from bumpgate.gate.bench import GateRunner


@dataclass(frozen=True)
class TimedRuns:
    """Runs the timed tests of one gate."""

    runner: GateRunner

    def warm(self, sessions: Sessions) -> None:
        """Warm the further compile caches with the timed tests; the run of the selection warmed the first."""
        tests = sorted(set(sessions.tests.values()))
        for pair in range(1, sessions.cache_pairs if tests else 1):
            for names in self.runner.groups(("good", "bad")):
                runs = self.runner.run_sides(
                    names,
                    f"compile cache {pair + 1}",
                    ["-n", "0", *tests],
                    f"warm-{{}}-{pair}.json",
                    timeout=TEST_SECONDS * len(tests),
                    pair=pair,
                    env_vars={"BUMPGATE_ROUNDS": "1"},
                )
                for name, run in runs.items():
                    self.runner.view.say(
                        f"{TITLES[name]}: compile cache {pair + 1} filled; {run.seconds:.0f} s"
                    )
        sessions.warm = True
        self.runner.save()

    def sessions(self, sessions: Sessions, other: str) -> None:
        """Run sessions of the candidate and `other` until every row is decided or the budget is spent.

        Near the deadline a session runs only as many open tests as still fit, the most important first.
        """
        before, longest, per_test = sessions.started, 0.0, 0.0
        with self.runner.view.doing("") as update:
            while tests := sessions.open_tests():
                started = time.monotonic()
                left = self.runner.deadline - started
                fitting = len(tests)
                if per_test and left < math.inf:
                    fitting = min(fitting, int(left / per_test))
                if left <= 0 or fitting < 1:
                    self.runner.view.say("the budget is spent: rows that are still open stay INCONCLUSIVE")
                    break
                update(f"{TITLES[other]} and candidate: {session_line(sessions)}")
                self._session(sessions, other, fitting)
                longest = max(longest, time.monotonic() - started)
                per_test = max(per_test, (time.monotonic() - started) / fitting)
                self.runner.save()
                if sessions.started % 4 == 0:
                    self.runner.view.say(
                        f"{TITLES[other]} and candidate: {session_line(sessions)}; the longest took {longest:.0f} s"
                    )
        if sessions.started > before and sessions.plan:
            outcomes = decide(sessions.log_ratios, sessions.plan, sessions.family)
            self.runner.view.say(timed_line(list(outcomes.values()), sessions))

    def _session(self, sessions: Sessions, other: str, tests: int) -> None:
        """Run one session: both sides at once if each can have its own cores, else one after the other (GPU)."""
        if lanes.require(self.runner.root, self.runner.gate.config.lane).device == "cpu" and shares():
            rounds = ROUNDS if sessions.only_slow_modes_open else DUET_ROUNDS
            sessions.run_duet(
                lambda nodes, flip: self._timed_pair(other, nodes, flip, sessions.cache, rounds), tests
            )
        else:
            sessions.run_one(
                lambda side, nodes: self._timed_process(
                    side if side == "bad" else other, nodes, sessions.cache
                ),
                tests,
            )

    def _timed_pair(
        self, other: str, tests: Sequence[str], flip: bool, pair: int, rounds: int
    ) -> tuple[TimedReading, TimedReading]:
        calls = [
            LaneCall(
                self.runner.env_specs[name].python,
                self.runner.root,
                self.runner.gate.config.lane,
                ["-n", "0", *tests],
                self.runner.out / f"timed-{name}.json",
                environment={**self.runner.env_specs[name].caches(pair), "BUMPGATE_ROUNDS": str(rounds)},
            )
            for name in (other, "bad")
        ]
        good, bad = (reading(run, tests) for run in run_duet(calls, flip, TEST_SECONDS * len(tests)))
        return good, bad

    def _timed_process(self, name: str, tests: Sequence[str], pair: int) -> TimedReading:
        runs = self.runner.run_sides(
            [name],
            "a timed process",
            ["-n", "0", *tests],
            "timed-{}.json",
            timeout=TEST_SECONDS * len(tests),
            pair=pair,
            env_vars={"BUMPGATE_ROUNDS": str(ROUNDS)},
        )
        return reading(runs[name], tests)
