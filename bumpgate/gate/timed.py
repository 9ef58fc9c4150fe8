"""Paired sessions of the timed rows: fresh processes of both sides, until every row is decided or the budget ends.

A row is timed if it carries an interval or is marked as paired; a time read once that looks worse is added
(bumpgate.gate.compare_rows). Each process gives a cost per row and each session a log-ratio (bumpgate.gate.sequential).
A session that lost a reading of a row is not used for that row.

A duet runs two processes at once, each on a share of the cores, which they exchange after every round: a busy
neighbour slows both. On a shared device they run one after the other, in alternating order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bumpgate.core.findings import NO_REGRESSION, TimedOutcome
from bumpgate.core.rows import (
    COST_PER_ROUND,
    Judgement,
    Problem,
    ProblemKind,
    Record,
    Row,
    Verdict,
    is_finite,
    is_time,
)
from bumpgate.gate.compare_rows import direction, kinds, looks_slower, timed, with_disturbed
from bumpgate.gate.modes import p_lost
from bumpgate.gate.plan import Family, SessionPlan, shares
from bumpgate.gate.sequential import alternate, decide, log_ratio, log_ratio_of_rounds
from bumpgate.process.child import ending
from bumpgate.process.runner import LaneRun

# Maximum ratio of an interval's ends: a wider one had too few quiet moments to be used as a reading.
MAX_CI_RATIO = 1.5
# Chance of a false call that the candidate loses more readings, in all tests of a gate.
ALPHA_LOST = 0.004
# Maximum number of consecutive sessions without a result. This many show that one side alone loses all its
# readings: 2^-8 is 0.98 of ALPHA_LOST.
MAX_EMPTY_SESSIONS = 8
# Verdicts of a record on a time that could be measured; the sessions override them.
MEASURED = (Verdict.PASS, Verdict.WIN, Verdict.NEW, Verdict.REGRESSION, Verdict.INCONCLUSIVE)
SIDE = {"A": "adopted", "B": "candidate"}


@dataclass(frozen=True)
class TimedReading:
    """Result of one process. costs: row id -> positive cost, less is better. faults: node id -> why it has none.
    lost: why a time could not be read, for any reason; "" if all were. rounds: row id -> its cost in each round of a
    duet.

    A disturbed machine or a broken instrument is not a fault: the affected rows are left out and measured again.
    """

    costs: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    rounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


# Measures the named tests once, in a new process of side "adopted" or "candidate".
Process = Callable[[str, Sequence[str]], TimedReading]
# Measures several such processes at the same time. A call: the number of its session among those that run at once, the
# side, and the tests.
Processes = Callable[[Sequence[tuple[int, str, Sequence[str]]]], Sequence[TimedReading]]
# Measures them on both sides at the same time. The flag: the two sides start on exchanged cores.
Duet = Callable[[Sequence[str], bool], tuple[TimedReading, TimedReading]]


def timed_rows(adopted: Record, candidate: Record) -> dict[str, str]:
    """Return row id -> node id of the rows to pair.

    These are the rows that both sides timed, and the times read once that look worse. A side whose test the machine
    disturbed counts as having timed its rows. If it disturbed both sides, only times are paired: any increase of a
    count or a size is a regression, and sessions allow a margin. Rows that a side lacks for another reason are left to
    the comparison of the records.
    """

    def measured(record: Record) -> dict[str, Judgement]:
        return {j.row.id: j for j in record.judgements if j.verdict in MEASURED}

    def spoiled(record: Record) -> dict[str, Row]:
        return {j.row.id: j.row for j in record.judgements if j.verdict is Verdict.INFRA and j.row.unmeasured}

    adopted, candidate = with_disturbed(adopted, candidate), with_disturbed(candidate, adopted)
    reads = measured(adopted), measured(candidate)
    before, after = ({id: j.row for id, j in side.items() if timed(j.row)} for side in reads)
    spoiled_before, spoiled_after = spoiled(adopted), spoiled(candidate)
    by_both = (before.keys() | spoiled_before.keys()) & (after.keys() | spoiled_after.keys())
    again = {id: j.row for id, j in reads[1].items() if id in reads[0] and looks_slower(reads[0][id], j)}
    disturbed = {
        id: row
        for id, row in spoiled_after.items()
        if id in spoiled_before and is_time(row) and direction(row)
    }
    found = {id: row for id, row in (disturbed | before | after).items() if id in by_both} | again
    other = {id for id in before.keys() & after.keys() if kinds(before[id], after[id])}
    return {id: row.test for id, row in found.items() if id not in other}


def cost(j: Judgement) -> float | None:
    """Return the cost of a row (lower is better), or None without a usable reading or a better direction."""
    value, interval, sign = j.row.value, j.row.interval, direction(j.row)
    if j.verdict not in MEASURED or not sign or not is_finite(value) or value <= 0:
        return None
    rounds = j.row.series.get(COST_PER_ROUND)  # of a duet: compared one by one, as rough as they are
    if interval and not (rounds or 0 < interval[0] <= interval[1] <= MAX_CI_RATIO * interval[0]):
        return None
    return value if sign > 0 else 1 / value


def reading(run: LaneRun, tests: Sequence[str], rows: Collection[str]) -> TimedReading:
    """Return the reading of a process that ran `tests`. rows: those to pair; a test may leave out its others."""
    judgements = run.record.judgements if run.record else ()
    costs = {j.row.id: c for j in judgements if (c := cost(j)) is not None}
    series = {j.row.id: j.row.series.get(COST_PER_ROUND, ()) for j in judgements}
    rounds = {row: points for row, points in series.items() if points and all(x > 0 for x in points)}
    missing = (j for j in judgements if j.verdict is Verdict.MISSING and j.row.unmeasured)
    faults = {j.row.test: j.reason for j in missing if j.row.id in rows}
    disturbed = ""
    for problem in run.record.problems if run.record else ():
        if problem.test in tests and problem.kind is ProblemKind.INFRA:
            disturbed = problem.why
        elif problem.test in tests:
            faults.setdefault(problem.test, problem.why)
    lost_rows = (j for j in judgements if j.row.test in tests and j.row.id not in costs)
    whys = (_why_lost(j) for j in lost_rows if j.verdict is Verdict.INFRA or timed(j.row))
    lost = run.failure or next(whys, disturbed)
    if run.code < 0 and not ending(run.code).crash:
        return TimedReading(costs, {}, lost, rounds)
    if run.failure:
        faults = dict.fromkeys(faults or tests, run.failure)
    return TimedReading(costs, faults, lost or next(iter(faults.values()), ""), rounds)


def _why_lost(j: Judgement) -> str:
    return f"{j.row.id}: " + (j.reason if j.verdict not in MEASURED else "too few quiet rounds for a time")


@dataclass
class Sessions:
    """The sessions so far. `plan` decides the rows; without it, each row gets `limit` sessions and no verdict.

    tests: row id -> node id. A test is timed while one of its rows is open, and then yields all its rows.
    started: number of completed sessions, empty ones included.
    consecutive_empty: number of empty ones at the end.
    lost: why a time was last lost.
    faults: side -> node id -> the first reason.
    failures: side -> number of processes with a fault.
    cache_pairs: number of pairs of compile caches, used in turn.
    warm: whether all of them have been filled.
    caches: row id -> the pair used by each of its log-ratios.
    lost_processes: node id -> side -> number of processes that lost a reading of that test.
    """

    tests: Mapping[str, str]
    plan: SessionPlan | None
    limit: int
    log_ratios: dict[str, list[float]] = field(default_factory=dict)
    started: int = 0
    consecutive_empty: int = 0
    lost: str = ""
    faults: dict[str, dict[str, str]] = field(default_factory=lambda: {"adopted": {}, "candidate": {}})
    failures: dict[str, int] = field(default_factory=lambda: {"adopted": 0, "candidate": 0})
    cache_pairs: int = 1
    warm: bool = False
    caches: dict[str, list[int]] = field(default_factory=dict)
    lost_processes: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log_ratios = {row: list(self.log_ratios.get(row, ())) for row in self.tests}
        self.caches = {row: list(self.caches.get(row, ())) for row in self.tests}

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types, without the plan."""
        raw = asdict(replace(self, plan=None))
        del raw["plan"]
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], plan: SessionPlan | None) -> Sessions:
        """Create sessions from the output of to_json. Raises TypeError on other fields."""
        return cls(plan=plan, **raw)

    @property
    def cache(self) -> int:
        """Return the pair of compile caches of the next session."""
        return self.cache_after(0)

    def cache_after(self, sessions: int) -> int:
        """Return the pair of compile caches of the session that follows the next `sessions`."""
        return (self.started + sessions) % self.cache_pairs

    @property
    def family(self) -> Family:
        """Return the rows' tests and caches, as the plan needs them."""
        return Family(self.tests, self.caches)

    def open_rows(self) -> list[str]:
        """Return the rows that another session may still decide, the most important first."""
        if self.consecutive_empty >= MAX_EMPTY_SESSIONS or self.started >= 2 * self.limit:
            return []
        outcomes = decide(self.log_ratios, self.plan, self.family) if self.plan else {}
        still = TimedOutcome.INCONCLUSIVE
        unlimited = (row for row, found in self.log_ratios.items() if len(found) < self.limit)
        rows = [row for row in unlimited if outcomes.get(row, still) is still]
        share = shares(self.log_ratios, self.plan) if self.plan else {}
        return sorted(rows, key=lambda row: -share.get(row, 1.0))

    @property
    def only_slow_modes_open(self) -> bool:
        """Whether the open rows are decided apart from slow modes, which need more processes, not longer ones."""
        if not self.plan or not (rows := self.open_rows()):
            return False
        unwatched = replace(self.plan, rules=tuple(replace(rule, watch=False) for rule in self.plan.rules))
        outcomes = decide(self.log_ratios, unwatched, self.family)
        return all(outcomes[row] in NO_REGRESSION for row in rows)

    def open_tests(self) -> list[str]:
        """Return the tests of the open rows, the most important first."""
        return list(dict.fromkeys(self.tests[row] for row in self.open_rows()))

    def run_one(self, process: Process, tests: Sequence[str] | None = None) -> None:
        """Run one session, one process after the other. tests: those of the open tests that it runs; None for all.

        A session that an exception interrupts is dropped: the readings of a pair must be close in time.
        """
        self.run_several(lambda calls: [process(side, nodes) for _, side, nodes in calls], 1, tests)

    def run_several(self, processes: Processes, count: int, tests: Sequence[str] | None = None) -> None:
        """Run `count` sessions at the same time, each one process after the other; otherwise like run_one.

        They take their orders and compile caches as if they ran in turn.
        """
        requested = self._rows_of(self.open_tests() if tests is None else tests)
        orders = [alternate(self.started + i) for i in range(count)]
        rows = [requested] * count
        readings: list[list[tuple[str, list[str], TimedReading]]] = [[] for _ in orders]
        for letters in zip(*orders):
            calls = [(i, SIDE[x], self._tests_of(rows[i])) for i, x in enumerate(letters) if rows[i]]
            for (i, side, _), result in zip(calls, processes(calls) if calls else ()):
                readings[i].append((side, rows[i], result))
                rows[i] = [row for row in rows[i] if row in result.costs]
        for order, complete, session in zip(orders, rows, readings):
            found = {row: log_ratio(order, [r.costs[row] for _, _, r in session]) for row in complete}
            self._keep(session, found)

    def run_duet(self, duet: Duet, tests: Sequence[str] | None = None) -> None:
        """Run one session, both sides at once."""
        requested = self._rows_of(self.open_tests() if tests is None else tests)
        adopted, candidate = duet(self._tests_of(requested), alternate(self.started) == "BA")
        found = {}
        for row in [row for row in requested if row in adopted.costs and row in candidate.costs]:
            rounds = adopted.rounds.get(row, ()), candidate.rounds.get(row, ())
            if len(rounds[0]) == len(rounds[1]) > 0:
                found[row] = log_ratio_of_rounds(*rounds)
            else:
                found[row] = log_ratio("AB", [adopted.costs[row], candidate.costs[row]])
        self._keep([("adopted", requested, adopted), ("candidate", requested, candidate)], found)

    def _rows_of(self, tests: Sequence[str]) -> list[str]:
        return [row for row in self.tests if self.tests[row] in tests]

    def _tests_of(self, rows: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self.tests[row] for row in rows))

    def _keep(
        self, readings: Iterable[tuple[str, list[str], TimedReading]], log_ratios: Mapping[str, float]
    ) -> None:
        for side, requested, found in readings:
            self.lost = f"{side}: {found.lost}" if found.lost else self.lost
            for test in self._tests_of([row for row in requested if row not in found.costs]):
                self.lost_processes.setdefault(test, {"adopted": 0, "candidate": 0})[side] += 1
            for test, why in found.faults.items():
                self.faults[side].setdefault(test, why)
            self.failures[side] += bool(found.faults)
        for row, value in log_ratios.items():
            if len(self.log_ratios[row]) < self.limit:
                self.log_ratios[row].append(value)
                self.caches[row].append(self.cache)
        self.started += 1
        self.consecutive_empty = 0 if log_ratios else self.consecutive_empty + 1

    def problems(self, side: str) -> tuple[Problem, ...]:
        """Return the faults of one side as problems of its record."""
        seen = f"(in {self.failures[side]} timed processes, {self.started} sessions)"
        faults = self.faults[side].items()
        return tuple(Problem(test, ProblemKind.FAILED, f"{why} {seen}") for test, why in faults)

    def unequal_losses(self) -> dict[str, float]:
        """Return node id -> adjusted p, for tests whose readings the candidate loses more often than the adopted."""
        adjusted = {
            test: p_lost(lost["candidate"], lost["adopted"]) * len(set(self.tests.values()))
            for test, lost in self.lost_processes.items()
        }
        return {test: p for test, p in adjusted.items() if p <= ALPHA_LOST}
