"""Test of a bisect: a selection of a lane's tests, judged by the rows and tests that differ between the endpoints."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bumpgate.bisect.probe import (
    LOG,
    RECORD,
    Cause,
    ProbeError,
    ProbeResult,
    Reading,
    fresh_caches,
    import_fault,
    without_verdict,
)
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.baseline import investigate
from bumpgate.core.errors import one_line
from bumpgate.core.findings import PRODUCT, Decision, Finding
from bumpgate.core.rows import ROW_ID, Judgement, ProblemKind, Record, Row, Verdict
from bumpgate.env import reference
from bumpgate.env.build import Environment
from bumpgate.gate.between import ValueChange, change
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.child import ending
from bumpgate.process.runner import NOTHING_SELECTED, USAGE, LaneRun, by_hand, options_of, run_lane

# Problems in a record that are not a test's fault: a skip, a selection, an interrupt.
THE_RUN = "the run"
# How a deciding row is red: by its value, or because its test raised an exception of this type.
BY_VALUE = "its value"
EXCEPTION = re.compile(
    r"(?:^|: )(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failed|Unsupported))\b"
)


@dataclass
class SuiteTest:
    """Selection of a lane's tests. The deciding rows and tests are those that are red at the bad endpoint only.

    A row that is worse than in the first complete record of the good endpoint, by the gate's margins, is red as well.

    A candidate is GOOD if its run is complete and all deciding rows are green, and BAD if one is red in the same way as
    at an endpoint. Other red rows are not counted. If a deciding row is red only in another way (its test raised,
    while at the bad endpoint the value is worse), another fault hides the answer: OTHER.

    deciding: row ids and node ids. kinds: how each is red at the endpoints. differs: False if red at both endpoints.
    variables: env_vars of an environment, in addition to its lock.
    """

    root: Path
    lane: str
    selection: tuple[str, ...]
    package: str
    timeout: float | None = None
    deciding: tuple[str, ...] = ()
    differs: bool = True
    variables: Callable[[Environment], Mapping[str, str]] = lambda environment: {}
    run_lane: Callable[..., LaneRun] = run_lane
    reference: Mapping[str, Row] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def run(self, environment: Environment, place: Path) -> Reading:
        with fresh_caches(place) as caches:
            done = self.run_lane(
                environment.python,
                self.root,
                self.lane,
                self.selection,
                place / RECORD,
                environment={
                    **reference.variables(environment.lock),
                    **self.variables(environment),
                    **caches,
                },
                timeout=self.timeout,
                log=place / LOG,
                # A complete run has imported torch; for an incomplete one, import_fault below checks the import.
                check_import=False,
            )
        if done.code == USAGE:
            raise ProbeError(f"pytest rejects the selection: {done.failure} (log: {place / LOG})")
        if done.code == NOTHING_SELECTED:
            raise ProbeError(f"{shlex.join(self.selection)} selects no test of lane {self.lane}")
        record, cause, failure = done.record, Cause.RAN, done.failure
        whole = record is not None and record.complete and not failure
        if not whole or (self.package != "torch" and record and record.red):
            if fault := import_fault(environment, "torch", self.package):
                cause, failure = Cause.BROKEN, fault
            elif failure and not ending(done.code).crash:
                cause = Cause.MACHINE
        return Reading(place, cause, done.code, failure, done.seconds, dict(environment.packages))

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        good_seen, bad_seen = ([Signals(reading) for reading in readings] for readings in (good, bad))
        self.reference = next((seen.rows for seen in good_seen if seen.reading.whole), {})
        names = sorted({name for seen in (*good_seen, *bad_seen) for name in seen.verdicts})
        at_good, at_bad = (
            {name: self._red_share(name, ends) for name in names} for ends in (good_seen, bad_seen)
        )
        worse = tuple(name for name in names if at_good[name] < at_bad[name])
        better = tuple(name for name in names if at_good[name] > at_bad[name])
        # If nothing is worse at the bad end, rows that are better there refute the endpoints, else rows red at both.
        self.differs = bool(worse or better)
        self.deciding = worse or better or tuple(name for name in names if at_good[name] > 0)
        self.kinds = {name: self._kinds(name, (*good_seen, *bad_seen)) for name in self.deciding}

    def unusable(self, reading: Reading) -> ProbeResult | None:
        if result := without_verdict(reading):
            return result
        seen = Signals(reading)
        red = any(self._verdict(seen, name) is Verdict.REGRESSION for name in seen.verdicts)
        return None if reading.whole or red else _cut_short(reading)

    def judge(self, reading: Reading) -> ProbeResult:
        if result := without_verdict(reading):
            return result
        seen = Signals(reading)
        states = {name: self._verdict(seen, name) for name in self.deciding}
        every = [name for name, state in states.items() if state is Verdict.REGRESSION]
        red = [name for name in every if seen.kinds[name] in self.kinds[name]]
        if red:
            more = f" and {len(red) - 1} more" if len(red) > 1 else ""
            return ProbeResult(ProbeOutcome.BAD, f"red: {red[0]}{more}")
        if every:
            expected = " or ".join(sorted(self.kinds[every[0]]))
            return ProbeResult(
                ProbeOutcome.OTHER,
                f"another fault: {every[0]}: {seen.kinds[every[0]]}; at the end it is {expected}",
            )
        if not reading.whole:
            return _cut_short(reading)
        unread = [(name, state) for name, state in states.items() if state is not Verdict.PASS]
        if unread:
            name, state = unread[0]
            again = state in (Verdict.INFRA, Verdict.INCONCLUSIVE)
            return ProbeResult(ProbeOutcome.UNKNOWN if again else ProbeOutcome.SKIP, f"{name}: {state.value}")
        others = sum(
            self._verdict(seen, name) is Verdict.REGRESSION for name in seen.verdicts if name not in states
        )
        more = f"; {others} red, not counted" if others else ""
        return ProbeResult(ProbeOutcome.GOOD, f"{len(states)} green{more}")

    def findings(self, good: str, before: Reading, bad: str, after: Reading) -> list[Finding]:
        verdict = judge_gate(
            self.lane, Side(good, before.record, before.failure), Side(bad, after.record, after.failure)
        )
        deciding = set(self.deciding)
        ours = [f for f in verdict.findings if deciding & {*f.rows, *f.tests}]
        if after.crash:
            seen = ("ran to its end",), (after.failure,)
            ours.append(Finding(Decision.HOLD, "CRASH", "", after.crash, (), *seen))
        return ours

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        rows = {j.row.id: j.row.test for j in reading.record.judgements} if reading and reading.record else {}
        names = [rows.get(name, name) for name in self.deciding]
        node = next((name for name in names if "::" in name), "")
        options = options_of(self.selection, reading.record if reading else None)
        return by_hand(environment.python, self.root, investigate(self.lane, node), options)

    def _verdict(self, seen: Signals, name: str) -> Verdict:
        """Return a row's verdict in a reading; REGRESSION also if its value is worse than at the good endpoint.

        Compiled code is compared with the good endpoint only, not with the baselines of the reviewed tritons.
        """
        state = seen.verdict(name)
        before, now = self.reference.get(name), seen.rows.get(name)
        if before is None or now is None or before.unmeasured or now.unmeasured:
            return state
        unread = state is Verdict.INSTRUMENT or before.value is None or now.value is None
        if state is not Verdict.PASS and (now.better != "code" or unread):
            return state
        return Verdict.REGRESSION if change(before, now) is ValueChange.WORSE else Verdict.PASS

    def _kinds(self, name: str, readings: Sequence[Signals]) -> set[str]:
        """Return how a row or test is red in these readings."""
        return {seen.kinds[name] for seen in readings if self._verdict(seen, name) is Verdict.REGRESSION}

    def _red_share(self, name: str, readings: Sequence[Signals]) -> float:
        """Return the share of conclusive readings in which a row is red; NaN (all comparisons false) without any."""
        states = [self._verdict(seen, name) for seen in readings]
        shown = [s for s in states if s in (Verdict.PASS, Verdict.REGRESSION)]
        return sum(s is Verdict.REGRESSION for s in shown) / len(shown) if shown else math.nan


class Signals:
    """Verdicts of all rows and tests in one reading. reading: of a lane run."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """The rows of the record, by id."""
        record = self.reading.record
        return {j.row.id: j.row for j in record.judgements} if record else {}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return row id or test -> REGRESSION if red, PASS if green, else the verdict that explains why neither."""
        found = {THE_RUN: Verdict.REGRESSION} if self.reading.crash else {}
        record = self.reading.record
        if record is None:
            return found
        skipped = {p.test for p in record.problems if p.kind is ProblemKind.GAP}
        found |= {j.row.id: _row_verdict(j, record, skipped) for j in record.judgements}
        found |= {p.subject: Verdict.INFRA for p in record.problems if p.kind is ProblemKind.INFRA}
        return found | {p.subject: Verdict.REGRESSION for p in record.problems if p.fault}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Return row id or test -> how it is red, if it is: BY_VALUE, an exception type, or the signal of a crash."""
        found = {THE_RUN: self.reading.crash} if self.reading.crash else {}
        if record := self.reading.record:
            found |= {p.subject: _exception(p.why) for p in record.problems}
            found |= {
                j.row.id: _exception(j.reason) if j.row.unmeasured else BY_VALUE for j in record.judgements
            }
        return found

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of a row or test. A test missing from the record of a complete run has passed."""
        silent = Verdict.PASS if self.reading.whole and not ROW_ID.fullmatch(name) else Verdict.MISSING
        return self.verdicts.get(name, silent)


def _cut_short(reading: Reading) -> ProbeResult:
    """Classify an incomplete run: SKIP if a file cannot be collected, else UNKNOWN (possibly the machine)."""
    problems = reading.record.problems if reading.record else ()
    uncollected = [str(p) for p in problems if p.kind is ProblemKind.UNCOLLECTED]
    causes = (*uncollected, reading.failure, *map(str, problems))
    why = one_line(next(iter(causes), "") or "the run was cut short")
    return ProbeResult(ProbeOutcome.SKIP if uncollected else ProbeOutcome.UNKNOWN, why)


def _row_verdict(j: Judgement, record: Record, skipped: set[str]) -> Verdict:
    if j.row.better == "defect" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT:
        # A defect's expected range is keyed by version, and the version is what a bisect varies: use the value.
        return Verdict.REGRESSION if j.row.value else Verdict.PASS
    # A derived row has been judged by its test, reviewed or not.
    derived = j.row.better == "derived" and j.verdict is Verdict.MISSING and not j.row.unmeasured
    if not j.red or derived:
        return Verdict.PASS
    lost = j.row.unmeasured and j.verdict is Verdict.MISSING and record.complete and j.row.test not in skipped
    return Verdict.REGRESSION if lost or j.verdict in PRODUCT else j.verdict


def _exception(reason: str) -> str:
    """Return the exception type at the start of a reason, after the test's name; "a failed test" without one."""
    found = EXCEPTION.search(reason.removeprefix("not reported by "))
    if found:
        return found[1]
    return "AssertionError" if re.search(r"(?:^|: )assert ", reason) else "a failed test"
