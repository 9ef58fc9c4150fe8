"""Paired sessions: readings of a process, which rows are timed again, and the false-HOLD rate of equal builds."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bumpgate.core import lanes
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.plan import Family, SessionPlan, SessionRule, plan_for
from bumpgate.gate.sequential import decide, summarise
from bumpgate.gate.timed import MAX_EMPTY_SESSIONS, Sessions, TimedReading, cost, reading
from bumpgate.plugin import timing
from bumpgate.plugin.rows import InfraError
from bumpgate.process.runner import LaneRun
from suites.support.lanes import LANES
from suites.throughput import starts
from tests.support.gating import TIME_TEST, count, gone, seconds
from tests.support.simulation import rate_text
from tests.support.tree import ROOT

ROWS = ("throughput/compiled/rate", "throughput/eager/rate", "throughput/compiled/speedup")
# Standard deviations between fresh processes on a quiet machine, from suites/throughput/test_train_step.py:
# 3.0 % of a torch step to the anchor, 1.1 % of two torch steps to each other; here split over the three workloads.
STEP_SD = 0.011 / math.sqrt(2)
ANCHOR_SD = math.sqrt(0.030**2 - STEP_SD**2)
BUDGET = SessionPlan().budget


def run_all(sessions: Sessions, process: Callable[[str, Sequence[str]], TimedReading]) -> Sessions:
    while sessions.open_rows():
        sessions.run_one(process)
    return sessions


def outcomes_of(rng: random.Random, bad_processes: float, slower: float = 1.0) -> list[TimedOutcome]:
    """Simulate a gate: three workloads, each with a bias of its process, in three ratios.

    bad_processes: share of processes with three times the bias. slower: factor of the candidate's compiled step.
    """

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        wide = 3 if rng.random() < bad_processes else 1
        anchor, compiled, eager = (rng.gauss(0, wide * sd) for sd in (ANCHOR_SD, STEP_SD, STEP_SD))
        compiled += math.log(slower) * (side == "candidate")
        logs = (compiled - anchor, eager - anchor, compiled - eager)
        return TimedReading({row: math.exp(x) for row, x in zip(ROWS, logs)})

    sessions = run_all(Sessions(dict.fromkeys(ROWS, TIME_TEST), SessionPlan(), BUDGET), process)
    return [t.outcome for t in summarise(sessions.log_ratios, SessionPlan()).values()]


@pytest.mark.parametrize("bad_processes", [0.0, 0.1])
def test_false_hold_of_simulated_gates_is_at_most_two_percent(bad_processes: float) -> None:
    """Not from recordings: the noise is drawn with the measured deviations, and with larger ones."""
    rng, runs = random.Random(7), 100
    held = sum(TimedOutcome.SLOWER in outcomes_of(rng, bad_processes) for _ in range(runs))
    assert held <= 0.02 * runs, rate_text("false HOLD", held, runs)


def test_five_percent_slowdown_is_found_in_the_same_noise() -> None:
    rng, runs = random.Random(8), 60
    held = sum(TimedOutcome.SLOWER in outcomes_of(rng, 0.1, slower=1.05) for _ in range(runs))
    assert held >= 0.95 * runs, rate_text("found", held, runs)


@pytest.mark.parametrize(("tests", "same"), [(("t::same", "t::slow"), 6), ((TIME_TEST, TIME_TEST), 12)])
def test_only_tests_with_open_rows_are_timed_again(tests: tuple[str, str], same: int) -> None:
    """The slow row needs 12 sessions, the other one 6. A test with an open row reads all of its rows: that costs
    nothing, and they are used in the search for slow modes.
    """
    sessions = Sessions(dict(zip(("a/same/s", "a/slow/s"), tests)), SessionPlan(), BUDGET)
    requested: list[list[str]] = []
    noise = random.Random(1)

    def process(side: str, nodes: Sequence[str]) -> TimedReading:
        requested.append([*nodes])
        slow = 1.06 if side == "candidate" else 1.0
        return TimedReading({"a/same/s": math.exp(noise.gauss(0, 0.005)), "a/slow/s": slow})

    run_all(sessions, process)
    assert {row: len(found) for row, found in sessions.log_ratios.items()} == {
        "a/same/s": same,
        "a/slow/s": 12,
    }
    assert (requested[0], requested[-1]) == ([*dict.fromkeys(tests)], [tests[1]])


def test_only_slow_modes_are_open_after_rows_are_same() -> None:
    """False before the first look, and after a session with a slow process, which must be measured in full."""
    plan = SessionPlan(rules=(SessionRule("a/watched/*", watch=True),))
    even = [0.001, -0.001] * 3

    def state(readings: Sequence[float]) -> Sessions:
        return Sessions({"a/watched/s": "t::a"}, plan, plan.budget, {"a/watched/s": list(readings)})

    found = [state(x).only_slow_modes_open for x in (even[:4], even, [*even, math.log(2)])]
    assert found == [False, True, False]
    assert state(even).open_rows() == ["a/watched/s"]


def test_cache_pairs_alternate_and_are_kept_with_readings() -> None:
    sessions = Sessions({"a/b/s": "t::a"}, SessionPlan(), 6, cache_pairs=2)
    used, lose = [], iter([False, False, True, False] + [False] * 20)

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        used.append(sessions.cache)
        return TimedReading({} if next(lose) else {"a/b/s": 1.0 + 0.1 * len(used)})

    for _ in range(5):
        sessions.run_one(process)
    assert used == [0, 0, 1, 0, 0, 1, 1, 0, 0]
    assert sessions.caches == {"a/b/s": [0, 0, 1, 0]}, "the second session lost its reading"
    assert sessions.lost_processes == {"t::a": {"adopted": 0, "candidate": 1}}


def test_most_important_tests_are_timed_if_time_is_short() -> None:
    rows = {f"kernels/k{i}/s": f"t::k{i}" for i in range(4)} | {"throughput/step/s": "t::step"}
    sessions = Sessions(rows, plan_for(), 6)
    requested: list[list[str]] = []

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        requested.append(list(tests))
        return TimedReading(dict.fromkeys(rows, 1.0))

    sessions.run_one(process, sessions.open_tests()[:2])
    assert requested == [["t::k0", "t::step"]] * 2
    read = [row for row, found in sessions.log_ratios.items() if found]
    assert read == ["kernels/k0/s", "throughput/step/s"]


@pytest.mark.parametrize(
    ("adopted", "candidate", "called"), [(0, 7, False), (0, 8, True), (8, 0, False), (8, 12, False)]
)
def test_unequal_losses_are_reported_at_their_level(adopted: int, candidate: int, called: bool) -> None:
    lost = {"t::a": {"adopted": adopted, "candidate": candidate}}
    sessions = Sessions({"a/b/s": "t::a"}, SessionPlan(), 72, lost_processes=lost)
    assert bool(sessions.unequal_losses()) is called


RATE = Row("a/b/c", 4.0, "x", 1, "C1", better="higher", interval=(3.9, 4.1))
COSTS = {
    "time": (seconds(4.0), 4.0),
    "rate": (Judgement(RATE, Verdict.WIN, ""), 0.25),
    "rough": (seconds(4.0, spread=0.4), None),
    "negative": (seconds(-4.0, spread=-0.01), None),
    "instrument": (Judgement(seconds(4.0).row, Verdict.INSTRUMENT, ""), None),
    "unreviewed": (Judgement(seconds(4.0).row, Verdict.NEW, "not reviewed"), 4.0),
    "count": (count(4), None),
    "gone": (gone(), None),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost_is_the_time_of_a_valid_timed_row(name: str) -> None:
    judgement, expected = COSTS[name]
    assert cost(judgement) == expected


def test_plan_depends_on_sessions_and_lane() -> None:
    """A short plan spends the full level by its last look, and watches for slow modes if its sessions suffice."""
    assert plan_for() == plan_for(99)
    short = plan_for(10)
    assert [look.sessions for look in short.looks] == [6, 8, 10]
    assert sum(look.different for look in short.looks) == sum(look.same for look in short.looks) == 1
    assert plan_for(6).looks[0].different == 1
    with pytest.raises(ValueError, match="at least 6 sessions, got 5"):
        plan_for(5)
    start = "throughput/start-cpu/{}_cpu_seconds".format
    watched = [
        plan_for(sessions, modes).rule(row).watch
        for sessions, modes, row in (
            (None, True, "throughput/a/b"),
            (None, True, start("warm")),
            (None, True, start("cold")),
            (SessionPlan().modes.sessions, True, "throughput/a/b"),
            (SessionPlan().modes.sessions - 1, True, "throughput/a/b"),
            (None, False, "throughput/a/b"),
        )
    ]
    assert watched == [True, True, False, True, False, False]
    plan = plan_for(None, False, "cuda", [("a/noisy-*", 0.2), ("throughput/start-*", 0.3)])
    assert (plan.settle, plan_for(None, True).settle) == (8, 16), "a GPU lane ends earlier"
    noisy = plan.rule("a/noisy-1/rate")
    assert (noisy.same, noisy.different, noisy.weight, noisy.rare) == (0.2, 0.02, 0.1, 0.2)
    assert plan.rule(start("cold")).same == 0.3, "before the rules of all lanes"
    assert plan.rule("a/quiet/rate").same == SessionPlan().same


def test_timing_without_a_quiet_round_keeps_every_round_and_a_wide_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a gate it waits for quiet rounds only so long; elsewhere until its budget ends."""
    monkeypatch.setenv("BUMPGATE_ROUNDS", "3")
    ran: list[str] = []
    kept = timing.interleaved({"a": lambda: ran.append("a")}, 40)
    assert kept.quiet + kept.disturbed + 1 == len(ran)
    assert kept.quiet == 3
    clock = iter(range(10**6))
    monkeypatch.setattr(timing, "_busy_seconds", lambda: float(next(clock)))
    noisy = timing.interleaved({"a": lambda: sum(range(10**5))}, 40, budget=60)
    assert (noisy.quiet, noisy.disturbed, noisy.witness) == (0, 6, 6), "twice the three of the gate"
    assert "the machine was busy in 6 of 6 rounds" in noisy.evidence()[0]
    assert noisy.cost("a").low == noisy.cost("a").median / 2
    monkeypatch.delenv("BUMPGATE_ROUNDS")
    assert timing.interleaved({"a": lambda: None}, 40, budget=0.0).witness == 1


def test_watch_counts_children_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before, busy = os.times(), [0.0]
    monkeypatch.setattr(timing, "_busy_seconds", lambda: busy[0])
    watch = timing.Watch()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    spent = os.times().children_user - before.children_user
    assert spent > 0
    busy[0] = spent + (os.times().user - before.user)
    assert watch.was_quiet(None), "the child's work is not another process's"
    busy[0] += 60
    assert not watch.was_quiet(None)


# Starts of suites/throughput, which compile if the folder of the caches is new; no process is started.


class OtherSide:
    """The other side of a paired session. empty: whether its caches are."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty

    def agree(self, value: object, what: str) -> None:
        """Agree to everything."""

    def exchange(self, value: object, what: str) -> bool:
        """Return the other side's answer."""
        return self.empty


class Starts:
    """made: what each start compiled. meanwhile: runs during the next start."""

    def __init__(self, caches: Path) -> None:
        self.caches, self.made = caches, list[int]()
        self.cached = True
        self.meanwhile: Callable[[], object] = lambda: None

    def run_json(self, *call: str, **options: object) -> dict[str, object]:
        self.meanwhile()
        compiled = 0 if self.caches.exists() and self.cached else 3
        self.caches.mkdir(exist_ok=True)
        self.made.append(compiled)
        return {"compiled": compiled, "losses": [1.0], "searches": 0}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    made = Starts(tmp_path / "starts")
    monkeypatch.setattr(starts, "_folder", lambda: made.caches)
    monkeypatch.setattr(starts, "run_json", made.run_json)
    monkeypatch.setattr(starts.Watch, "was_quiet", lambda watch, duet: True)
    monkeypatch.setattr(starts, "_made_by", lambda: {"torch": "2.13.0"})
    return made


@pytest.mark.parametrize(("quiet", "count"), [((True,), 1), ((False, True), 2), ((False, False), 0)], ids=str)
def test_disturbed_start_is_repeated(
    quiet: tuple[bool, ...], count: int, monkeypatch: pytest.MonkeyPatch, begun: Starts
) -> None:
    answers = iter(quiet)
    monkeypatch.setattr(starts, "partner", OtherSide)
    monkeypatch.setattr(starts.Watch, "was_quiet", lambda watch, duet: next(answers))
    if not count:
        with pytest.raises(InfraError, match="other processes used this machine during 2 starts"):
            starts.cold_start(LANES["cpu"])
        return
    starts.cold_start(LANES["cpu"])
    assert begun.made == [3] * count, "each attempt starts on an empty cache"


def test_cold_start_compiles_and_warm_start_does_not(begun: Starts) -> None:
    warm = starts.warm_start(LANES["cpu"])
    assert (warm["compiled"], warm["cold"]["losses"]) == (0, [1.0])
    starts.cold_start(LANES["cpu"])
    starts.warm_start(LANES["cpu"])
    assert begun.made == [3, 0, 3, 0], "without a cold start the caches are filled first"


def test_starts_of_two_workers_use_the_caches_in_turn(begun: Starts) -> None:
    other = threading.Thread(target=starts.warm_start, args=[LANES["cpu"]])

    def other_waits() -> None:
        begun.meanwhile = lambda: None
        other.start()
        other.join(0.5)
        assert other.is_alive(), "the warm start did not wait for the cold one"

    begun.meanwhile = other_waits
    starts.cold_start(LANES["cpu"])
    other.join(10)
    assert begun.made == [3, 0]


def test_each_gpu_has_its_own_start_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed tests on two GPUs run at the same time."""
    folders = []
    for gpu in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        folders.append(starts._folder())
    assert folders[0] != folders[1]


def miss(begun: Starts, patch: pytest.MonkeyPatch) -> None:
    """If it were repeated, a cache that now and then misses would never be seen: the second process would hit."""
    begun.cached = False


WARM = {
    "cache that misses is not filled again": (miss, [3, 3]),
    "caches of another build are filled": (
        lambda _, patch: patch.setattr(starts, "_made_by", lambda: {"torch": "2.14.1"}),
        [3, 3, 0],
    ),
    "other side's caches are full": (
        lambda _, patch: patch.setattr(starts, "partner", OtherSide),
        [3, 0],
    ),
    "both sides fill empty caches": (
        lambda _, patch: patch.setattr(starts, "partner", lambda: OtherSide(True)),
        [3, 3, 0],
    ),
}


@pytest.mark.parametrize("name", WARM)
def test_warm_start_fills_caches_if_it_must(
    name: str, begun: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, made = WARM[name]
    starts.cold_start(LANES["cpu"])
    change(begun, monkeypatch)
    assert starts.warm_start(LANES["cpu"])["compiled"] == made[-1]
    assert begun.made == made


def test_missing_row_is_a_fault_only_if_it_is_paired(tmp_path: Path) -> None:
    """A test may leave out what a session does not pair, and must report what it does."""
    lost = [
        Judgement(Row(id, None, "s", 0, "", test=TIME_TEST), Verdict.MISSING, "no longer reported")
        for id in ("a/b/paired", "a/b/other")
    ]
    run = LaneRun(1, Record({}, tuple(lost)), "", 1.0, tmp_path)
    assert reading(run, [TIME_TEST], ["a/b/paired"]).faults == {TIME_TEST: "no longer reported"}
    assert reading(run, [TIME_TEST], []) == TimedReading()


@pytest.mark.parametrize(("signal", "fault"), [(11, True), (6, True), (9, False), (15, False)])
def test_crash_of_a_process_is_a_fault_and_its_end_from_outside_is_none(
    tmp_path: Path, signal: int, fault: bool
) -> None:
    run = LaneRun(-signal, None, f"died of signal {signal}", 1.0, tmp_path)
    found = reading(run, [TIME_TEST], [ROWS[0]])
    assert found.faults == ({TIME_TEST: run.failure} if fault else {})
    assert found.lost == run.failure


def test_empty_sessions_end_the_measurement_only_in_a_row() -> None:
    sessions = Sessions({ROWS[0]: TIME_TEST}, plan_for(None, True), 72)
    for n in range(2 * MAX_EMPTY_SESSIONS):
        costs = {ROWS[0]: 1.0} if n == MAX_EMPTY_SESSIONS - 1 else {}
        assert sessions.open_rows() == [ROWS[0]], f"after {n} sessions"
        sessions.run_one(lambda side, tests, costs=costs: TimedReading(costs))
    assert sessions.open_rows() == []


def test_sessions_that_lose_readings_now_and_then_end() -> None:
    """At twice the sessions that a row may have."""
    sessions = Sessions({ROWS[0]: TIME_TEST}, None, 3)
    run_all(sessions, lambda side, tests: TimedReading({} if sessions.started else {ROWS[0]: 1.0}))
    assert sessions.started == 6


def test_series_with_a_round_of_no_cost_is_not_used(tmp_path: Path) -> None:
    """It has no logarithm. The medians of both sides are compared instead."""

    def measured(value: float, points: tuple[float, ...]) -> TimedReading:
        fields = {"interval": (0.9 * value, 1.1 * value), "series": {"cost_per_round": points}}
        row = Row(ROWS[0], value, "s", 1, "C37", better="lower", test=TIME_TEST, **fields)  # type: ignore[arg-type]
        found = Record({"lane": "cpu"}, (Judgement(row, Verdict.PASS, ""),))
        return reading(LaneRun(0, found, "", 1.0, tmp_path), [TIME_TEST], [ROWS[0]])

    made = Sessions({ROWS[0]: TIME_TEST}, plan_for(None, True), 72)
    made.run_duet(lambda tests, flip: (measured(1.0, (1.0, 1.0)), measured(2.0, (1.0, 0.0))))
    assert made.log_ratios == {ROWS[0]: [pytest.approx(math.log(2))]}


# Sessions of a real gate on four H200s, and gates drawn from their noise: what the plan of that lane decides.


RECORDED: dict[str, list[str | float]] = json.loads(
    (ROOT / "tests/gate/recorded_gpu_sessions.json").read_text()
)["rows"]
TESTS = {row: str(values[0]) for row, values in RECORDED.items()}
SESSIONS = {row: [float(x) for x in values[1:]] for row, values in RECORDED.items()}
LANE = lanes.require(ROOT, "h200")
PLAN = plan_for(None, LANE.slow_modes, LANE.device, LANE.margins)
AT_ONCE = 4
ATTENTION = "kernels/attention-P128/both_milliseconds"
DECIDED = 24  # sessions


def noise(row: str) -> list[list[float]]:
    """Return what each session of a row differs by from its pair of caches."""
    pairs = [SESSIONS[row][i::2] for i in range(2)]
    return [[x - statistics.median(pair) for x in pair] for pair in pairs]


NOISE = {row: noise(row) for row in SESSIONS}


def drawn(rng: random.Random, planted: dict[str, float]) -> dict[str, TimedOutcome]:
    """Run one gate of an unchanged build but for `planted` log-ratios, with several sessions at a time, to DECIDED."""
    have: dict[str, list[float]] = {row: [] for row in NOISE}
    outcomes = dict.fromkeys(NOISE, TimedOutcome.INCONCLUSIVE)
    for begun in range(0, DECIDED, AT_ONCE):
        tests = {TESTS[row] for row in have if outcomes[row] is TimedOutcome.INCONCLUSIVE}
        for row in [row for row in have if TESTS[row] in tests]:
            for i in range(begun, begun + AT_ONCE):
                have[row].append(rng.choice((-1, 1)) * rng.choice(NOISE[row][i % 2]) + planted.get(row, 0.0))
        outcomes = decide(have, PLAN, Family(TESTS))
    return outcomes


def test_recorded_sessions_are_decided_as_in_their_gate() -> None:
    found = decide(SESSIONS, PLAN, Family(TESTS))
    assert len(set(TESTS.values())) == 37
    counts = {"SAME": 43, "NOT SLOWER": 18, "SLOWER": 14, "INCONCLUSIVE": 1}
    assert Counter(outcome.value for outcome in found.values()) == counts
    assert found["kernels/mla-P64/forward_milliseconds"] is TimedOutcome.NOT_SLOWER, "35 % faster"
    slower = {row for row, outcome in found.items() if outcome is TimedOutcome.SLOWER}
    kernels = {row.split("/")[1].split("-")[0] for row in slower if row.startswith("kernels/")}
    assert kernels == {"attention", "cross_entropy"}
    assert found["throughput/start-h200/cold_aot_cpu_seconds"] is TimedOutcome.INCONCLUSIVE


@pytest.mark.parametrize("planted", [0.0, 0.05])
def test_gates_drawn_from_the_noise_of_an_h200(planted: float) -> None:
    """Unchanged, and with one kernel that is 5 % slower."""
    rng, gates = random.Random(7), 40
    games = [drawn(rng, {ATTENTION: math.log1p(planted)}) for _ in range(gates)]
    others = [{outcome for row, outcome in game.items() if row != ATTENTION} for game in games]
    held = sum(bool({TimedOutcome.SLOWER, TimedOutcome.SLOW_MODE} & found) for found in others)
    assert held <= 1, rate_text("false HOLD", held, gates)
    outcome = TimedOutcome.SLOWER if planted else TimedOutcome.SAME
    assert sum(game[ATTENTION] is outcome for game in games) >= 0.95 * gates
    still_open = [sum(o is TimedOutcome.INCONCLUSIVE for o in game.values()) for game in games]
    assert statistics.median(still_open) <= 2
