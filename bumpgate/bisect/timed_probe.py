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

from bumpgate.bisect.gate_finding import GateFinding
from bumpgate.bisect.probe import Cause, ProbeResult, Reading, Test, cache_variables, import_fault
from bumpgate.bisect.search import BAD, GOOD, OTHER, UNKNOWN
from bumpgate.core import lanes
from bumpgate.core.errors import one_line
from bumpgate.core.findings import Finding
from bumpgate.core.findings import TimedOutcome as Timed
from bumpgate.core.rows import Record, write_atomic
from bumpgate.core.text import some
from bumpgate.env.build import Environment
from bumpgate.env.compiled import COPIES
from bumpgate.env.packages import lock_variables
from bumpgate.gate.environments import ROUNDS, TEST_SECONDS
from bumpgate.gate.pairing import run_duet, shares
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
class TimedTest(Test):
    """Timed rows of one test. GOOD if all deciding rows are SAME or FASTER, BAD if one is SLOWER, else UNKNOWN.

    finding: the SLOWER finding of a gate. good: builds the environment of the good endpoint, which is paired with every
    candidate. say: prints a line while another process has the device. variables: env_vars of an environment.
    deciding: the rows that are SLOWER at the bad endpoint.
    """

    root: Path
    lane: str
    finding: GateFinding
    good: Callable[[], Environment]
    package: str
    say: Callable[[str], None] = print
    variables: Callable[[Environment], Mapping[str, str]] = lambda environment: {}

    @cached_property
    def plan(self) -> SessionPlan:
        """Return the gate's plan for this lane, with half of each row's slowdown as its only margin."""
        lane = lanes.require(self.root, self.lane)
        plan = plan_for(self.finding.sessions or MOST, lane.slow_modes, lane.device, lane.margins)
        margins = {row: math.sqrt(ratio) - 1 for row, ratio in self.finding.ratios.items()}
        rules = tuple(SessionRule(escape(row), margin, margin) for row, margin in margins.items())
        return replace(plan, rules=rules + plan.rules)

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
            sessions = Sessions(self.finding.tests, self.plan, self.plan.budget, cache_pairs=COPIES)
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
        ends, rows = [self._outcomes(end) for end in bad], tuple(self.finding.tests)
        slower = tuple(row for row in rows if any(end.get(row) is Timed.SLOWER for end in ends))
        self.deciding = slower or rows

    def judge_run(self, reading: Reading) -> ProbeResult:
        if reading.code == REFERENCE:
            return ProbeResult(GOOD, "the reference of all times, not measured against itself")
        sessions = self._saved(reading.place)
        if sessions is None:
            return ProbeResult(UNKNOWN, f"{SESSIONS} is missing")
        outcomes = self._outcomes(reading)
        rows = self.deciding or tuple(self.finding.tests)
        by_outcome = {state: [row for row in rows if outcomes[row] is state] for state in Timed}
        undecided = [*by_outcome[Timed.INCONCLUSIVE], *by_outcome[Timed.SLOW_MODE]]
        if slower := by_outcome[Timed.SLOWER]:
            return ProbeResult(BAD, f"slower: {_shown(sessions, slower)}")
        if not undecided:
            return ProbeResult(GOOD, f"not slower: {_shown(sessions, rows)}")
        if faults := sessions.faults["candidate"]:
            test, why = next(iter(faults.items()))
            return ProbeResult(OTHER, f"another fault: {test}: {one_line(why, 160)}")
        return ProbeResult(UNKNOWN, f"undecided: {_shown(sessions, undecided)}")

    def findings(self, names: tuple[str, str], good: Reading, bad: Reading) -> list[Finding]:
        sessions = self._saved(bad.place)
        if sessions is None:
            return []
        empty = Record({"lane": self.lane}, ())
        timed = summarise(sessions.log_ratios, self.plan, sessions.family)
        verdict = judge_gate(self.lane, Side(names[0], empty), Side(names[1], empty), timed)
        return [f for f in verdict.findings if set(f.rows) & set(self.deciding)]

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        nodes = sorted({self.finding.tests[row] for row in self.deciding or self.finding.tests})
        pythons = "--python-adopted", str(self.good().python), "--python-candidate", str(environment.python)
        return shlex.join(
            ["bumpgate", "gate", "--lane", self.lane, *pythons, "--", *self.finding.options, *nodes]
        )

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
        return found if dict(found.tests) == dict(self.finding.tests) else None


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
        env_vars = {**lock_variables(environment.lock), **self.test.variables(environment), **caches}
        env_vars |= {"BUMPGATE_ROUNDS": str(rounds)} if rounds else {}
        selection = [*self.test.finding.options, "-n", "0", *tests]
        where = self.test.root, self.test.lane, selection, self.place / f"timed-{side}.json"
        return LaneCall(environment.python, *where, environment=env_vars)

    def _save(self, sessions: Sessions) -> None:
        write_atomic(self.place / SESSIONS, json.dumps(sessions.to_json(), indent=1) + "\n")


def _shown(sessions: Sessions, rows: Sequence[str]) -> str:
    """`throughput/nam52/seconds +10.2 % in 12 sessions and 1 more`."""
    values = sessions.log_ratios[rows[0]]
    change = f"{100 * math.expm1(estimate(values)):+.1f} %" if values else "no time"
    return some([f"{rows[0]} {change} in {len(values)} session{'s' * (len(values) != 1)}", *rows[1:]], 1)
