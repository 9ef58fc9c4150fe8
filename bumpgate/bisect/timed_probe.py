"""Test of a bisect: timed rows of a lane, measured in paired sessions with the environment of the good endpoint.

One reading of a time does not decide, so a probe is a complete sequential test, as in a gate: fresh processes of both
sides, until each row is SLOWER, SAME or FASTER, or the sessions are used up. A row counts as slower from half of the
slowdown (in logarithm) that the gate found: few sessions distinguish a candidate with all of it from one with none.
The good endpoint is the reference: it is not measured against itself.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path

from bumpgate.bisect.probe import (
    Cause,
    ProbeResult,
    Reading,
    cache_variables,
    import_fault,
    without_verdict,
)
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core import lanes
from bumpgate.core.errors import one_line
from bumpgate.core.findings import Finding
from bumpgate.core.findings import TimedOutcome as Timed
from bumpgate.core.rows import Record, write_atomic
from bumpgate.core.text import some
from bumpgate.env.build import Environment
from bumpgate.env.compiled import COPIES
from bumpgate.env.packages import lock_variables
from bumpgate.gate.duet import run_duet, shares
from bumpgate.gate.environments import ROUNDS, TEST_SECONDS
from bumpgate.gate.plan import SessionPlan, SessionRule, plan_for
from bumpgate.gate.sequential import decide, estimate, summarise
from bumpgate.gate.timed import Sessions, reading
from bumpgate.gate.timed import TimedReading as Times
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.locks import device_lock
from bumpgate.process.runner import LaneCall, run_lanes

SESSIONS = "sessions.json"
# Maximum number of paired sessions of a probe if the gate did not limit its own: a row that is open after these is
# close to half of the slowdown.
MOST = 28
# Sessions without any time, and with a failing test, after which a candidate is not measured further.
FAILING = 2
# Value of Reading.code: the good endpoint, which needs no session, or a measured candidate.
REFERENCE, MEASURED = 0, 1


@dataclass
class TimedTest:
    """Timed rows of one test. GOOD if all deciding rows are SAME or FASTER, BAD if one is SLOWER, else UNKNOWN.

    tests: row id -> node id. ratios: row id -> the slowdown that was found (1.1 is 10 % slower). good: builds the
    environment of the good endpoint, which is paired with every candidate. sessions: maximum number in a probe.
    deciding: the rows that are SLOWER at the bad endpoint. say: prints a line while another process has the device.
    variables: env_vars of an environment. options: of pytest.
    """

    root: Path
    lane: str
    tests: Mapping[str, str]
    ratios: Mapping[str, float]
    good: Callable[[], Environment]
    package: str
    sessions: int | None = None
    say: Callable[[str], None] = print
    variables: Callable[[Environment], Mapping[str, str]] = lambda environment: {}
    deciding: tuple[str, ...] = ()
    differs: bool = True
    options: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> SessionPlan:
        """Return the gate's plan for this lane, with half of each row's slowdown as its only margin."""
        lane = lanes.require(self.root, self.lane)
        plan = plan_for(self.sessions or MOST, lane.slow_modes, lane.device, lane.margins)
        margins = {row: math.sqrt(ratio) - 1 for row, ratio in self.ratios.items()}
        return replace(
            plan, rules=(*(SessionRule(escape(row), m, m) for row, m in margins.items()), *plan.rules)
        )

    @property
    def misreads(self) -> tuple[float, float]:
        """Return upper bounds of the misread rates (good candidate BAD, bad one GOOD): the levels of the plan."""
        return self.plan.alpha / 2, self.plan.alpha_same

    def run(self, environment: Environment, place: Path) -> Reading:
        packages = dict(environment.packages)
        good = self.good()
        if environment.key == good.key:
            return Reading(place, Cause.RAN, REFERENCE, packages=packages)
        started = time.monotonic()
        sessions = self._saved(place)
        if sessions is None:  # a killed probe continues with its caches; another one starts with empty ones
            shutil.rmtree(place / "caches", ignore_errors=True)
            sessions = Sessions(self.tests, self.plan, self.plan.budget, cache_pairs=COPIES)
        with device_lock(lanes.require(self.root, self.lane), self.say):
            _Pair(self, {"adopted": good, "candidate": environment}, place).measure(sessions)
        shutil.rmtree(place / "caches", ignore_errors=True)
        cause, failure = Cause.RAN, ""
        if not any(sessions.log_ratios.values()):
            if fault := import_fault(environment, "torch", self.package):
                cause, failure = Cause.BROKEN, fault
            elif sessions.faults["adopted"] or not sessions.faults["candidate"]:
                cause, failure = Cause.MACHINE, f"no time was read: {one_line(sessions.lost, 160)}"
                (place / SESSIONS).unlink(missing_ok=True)
        return Reading(place, cause, MEASURED, failure, time.monotonic() - started, packages)

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        found = {
            row for end in bad for row, outcome in self._outcomes(end).items() if outcome is Timed.SLOWER
        }
        self.deciding = tuple(row for row in self.tests if row in found) or tuple(self.tests)

    def unusable(self, reading: Reading) -> ProbeResult | None:
        result = self.judge(reading)
        return None if result.outcome in (ProbeOutcome.GOOD, ProbeOutcome.BAD) else result

    def judge(self, reading: Reading) -> ProbeResult:
        if result := without_verdict(reading):
            return result
        if reading.code == REFERENCE:
            return ProbeResult(ProbeOutcome.GOOD, "the reference of all times, not measured against itself")
        sessions = self._saved(reading.place)
        if sessions is None:
            return ProbeResult(ProbeOutcome.UNKNOWN, f"{SESSIONS} is missing")
        outcomes = self._outcomes(reading)
        rows = self.deciding or tuple(self.tests)
        by_outcome = {state: [row for row in rows if outcomes[row] is state] for state in Timed}
        undecided = [*by_outcome[Timed.INCONCLUSIVE], *by_outcome[Timed.SLOW_MODE]]
        if slower := by_outcome[Timed.SLOWER]:
            return ProbeResult(ProbeOutcome.BAD, f"slower: {_shown(sessions, slower)}")
        if not undecided:
            return ProbeResult(ProbeOutcome.GOOD, f"not slower: {_shown(sessions, rows)}")
        if faults := sessions.faults["candidate"]:
            test, why = next(iter(faults.items()))
            return ProbeResult(ProbeOutcome.OTHER, f"another fault: {test}: {one_line(why, 160)}")
        return ProbeResult(ProbeOutcome.UNKNOWN, f"undecided: {_shown(sessions, undecided)}")

    def findings(self, names: tuple[str, str], good: Reading, bad: Reading) -> list[Finding]:
        sessions = self._saved(bad.place)
        if sessions is None:
            return []
        empty = Record({"lane": self.lane}, ())
        timed = summarise(sessions.log_ratios, self.plan, sessions.family)
        verdict = judge_gate(self.lane, Side(names[0], empty), Side(names[1], empty), timed)
        return [f for f in verdict.findings if set(f.rows) & set(self.deciding)]

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        nodes = sorted({self.tests[row] for row in self.deciding or self.tests})
        pythons = "--python-adopted", str(self.good().python), "--python-candidate", str(environment.python)
        return shlex.join(["bumpgate", "gate", "--lane", self.lane, *pythons, "--", *self.options, *nodes])

    def _outcomes(self, reading: Reading) -> dict[str, Timed]:
        sessions = self._saved(reading.place)
        return decide(sessions.log_ratios, self.plan, sessions.family) if sessions else {}

    def _saved(self, place: Path) -> Sessions | None:
        """Load the sessions of a probe; None if there are none, or they are of other rows."""
        try:
            raw = json.loads((place / SESSIONS).read_text(encoding="utf-8"))
            found = Sessions.from_json(raw, self.plan)
        except (OSError, ValueError, TypeError):
            return None
        return found if dict(found.tests) == dict(self.tests) else None


@dataclass(frozen=True)
class _Pair:
    """Processes of one probe. sides: "adopted" and "candidate". place: the folder of the reading."""

    test: TimedTest
    sides: Mapping[str, Environment]
    place: Path

    def measure(self, sessions: Sessions) -> None:
        """Run sessions until every row is decided, and save each. A test that only fails ends them early."""
        at_once = lanes.require(self.test.root, self.test.lane).device == "cpu" and bool(shares())
        if not sessions.warm:
            self._fill_caches(sessions, at_once)
        while sessions.open_tests():
            failing = sessions.faults["candidate"] and sessions.started == sessions.consecutive_empty
            if failing and sessions.started >= FAILING:
                break
            if at_once:
                sessions.run_duet(lambda tests, flip: self._duet(sessions, tests, flip))
            else:
                sessions.run_one(lambda side, tests: self._process(side, sessions, tests))
            self._save(sessions)

    def _fill_caches(self, sessions: Sessions, at_once: bool) -> None:
        """Compile once in each pair of caches: no session has a cold start."""
        tests = sorted(set(sessions.tests.values()))
        for pair in range(sessions.cache_pairs):
            for sides in [("adopted", "candidate")] if at_once else [("adopted",), ("candidate",)]:
                run_lanes(
                    [self._call(side, pair, tests, rounds=1) for side in sides], TEST_SECONDS * len(tests)
                )
        sessions.warm = True
        self._save(sessions)

    def _duet(self, sessions: Sessions, tests: Sequence[str], flip: bool) -> tuple[Times, Times]:
        calls = [self._call(side, sessions.cache, tests) for side in ("adopted", "candidate")]
        runs = run_duet(calls, flip, TEST_SECONDS * len(tests))
        good, bad = (reading(run, tests, sessions.tests) for run in runs)
        return good, bad

    def _process(self, side: str, sessions: Sessions, tests: Sequence[str]) -> Times:
        call = self._call(side, sessions.cache, tests, rounds=ROUNDS)
        return reading(run_lanes([call], TEST_SECONDS * len(tests))[0], tests, sessions.tests)

    def _call(self, side: str, pair: int, tests: Sequence[str], rounds: int | None = None) -> LaneCall:
        environment = self.sides[side]
        caches = cache_variables(self.place / "caches" / f"{side}-{pair}")
        env_vars = {"BUMPGATE_ROUNDS": str(rounds)} if rounds else {}
        return LaneCall(
            environment.python,
            self.test.root,
            self.test.lane,
            [*self.test.options, "-n", "0", *tests],
            self.place / f"timed-{side}.json",
            environment={
                **lock_variables(environment.lock),
                **self.test.variables(environment),
                **caches,
                **env_vars,
            },
        )

    def _save(self, sessions: Sessions) -> None:
        write_atomic(self.place / SESSIONS, json.dumps(sessions.to_json(), indent=1) + "\n")


def _shown(sessions: Sessions, rows: Sequence[str]) -> str:
    """`throughput/nam52/seconds +10.2 % in 12 sessions and 1 more`."""
    values = sessions.log_ratios[rows[0]]
    change = f"{100 * math.expm1(estimate(values)):+.1f} %" if values else "no time"
    sessions_of = f"{rows[0]} {change} in {len(values)} session{'s' * (len(values) != 1)}"
    return some([sessions_of, *rows[1:]], 1)
