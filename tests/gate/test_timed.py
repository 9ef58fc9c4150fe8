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
from bumpgate.gate.pairing import balanced
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


def simulated(
    rng: random.Random, bad_processes: float, slower: float = 1.0
) -> Callable[[str, Sequence[str]], TimedReading]:
    """A timed process: three workloads, each with a bias of this process, in three ratios.

    bad_processes: share of processes with three times the bias. slower: factor of the candidate's compiled step.
    """

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        wide = 3 if rng.random() < bad_processes else 1
        anchor, compiled, eager = (rng.gauss(0, wide * sd) for sd in (ANCHOR_SD, STEP_SD, STEP_SD))
        compiled += math.log(slower) * (side == "candidate")
        logs = (compiled - anchor, eager - anchor, compiled - eager)
        return TimedReading({row: math.exp(x) for row, x in zip(ROWS, logs)})

    return process


def outcomes_of(process: Callable[[str, Sequence[str]], TimedReading]) -> list[TimedOutcome]:
    sessions = Sessions(dict.fromkeys(ROWS, TIME_TEST), SessionPlan(), SessionPlan().budget)
    while sessions.open_rows():
        sessions.run_one(process)
    return [t.outcome for t in summarise(sessions.log_ratios, SessionPlan()).values()]


@pytest.mark.parametrize("bad_processes", [0.0, 0.1])
def test_false_hold_of_simulated_gates_is_at_most_two_percent(bad_processes: float) -> None:
    """Not from recordings: the noise is drawn with the measured deviations, and with larger ones."""
    rng, runs = random.Random(7), 100
    found = [outcomes_of(simulated(rng, bad_processes)) for _ in range(runs)]
    held = sum(TimedOutcome.SLOWER in outcomes for outcomes in found)
    unknown = sum(TimedOutcome.INCONCLUSIVE in outcomes for outcomes in found)
    text = f"{rate_text('false HOLD', held, runs)}; {unknown} UNKNOWN"
    print(text)
    assert held <= 0.02 * runs, text


def test_five_percent_slowdown_is_found_in_the_same_noise() -> None:
    rng, runs = random.Random(8), 60
    held = sum(TimedOutcome.SLOWER in outcomes_of(simulated(rng, 0.1, slower=1.05)) for _ in range(runs))
    print(rate_text("found", held, runs))
    assert held >= 0.95 * runs


def test_only_tests_with_open_rows_are_timed_again() -> None:
    """The slow row needs 12 sessions; the other test is decided after 6 and must not be timed again."""
    sessions = Sessions({"a/same/s": "t::same", "a/slow/s": "t::slow"}, SessionPlan(), SessionPlan().budget)
    requested: list[list[str]] = []

    def process(side: str, tests: list[str]) -> TimedReading:
        requested.append(list(tests))
        draw = random.Random(len(requested)).gauss
        slow = 1.06 if side == "candidate" else 1.0
        return TimedReading(
            {"a/same/s": math.exp(draw(0, 0.005)), "a/slow/s": slow * math.exp(draw(0, 0.005))}
        )

    while sessions.open_rows():
        sessions.run_one(process)
    counts = {row: len(found) for row, found in sessions.log_ratios.items()}
    assert counts == {"a/same/s": 6, "a/slow/s": 12}
    assert (requested[0], requested[-1]) == (["t::same", "t::slow"], ["t::slow"])


def test_with_an_open_row_reads_all_its_rows() -> None:
    """Reading its decided rows costs nothing, and they are used in the search for slow modes."""
    sessions = Sessions(
        dict.fromkeys(("a/same/s", "a/slow/s"), TIME_TEST), SessionPlan(), SessionPlan().budget
    )
    noise = random.Random(1)

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        slow = 1.06 if side == "candidate" else 1.0
        return TimedReading({"a/same/s": math.exp(noise.gauss(0, 0.005)), "a/slow/s": slow})

    while sessions.open_rows():
        sessions.run_one(process)
    assert {row: len(found) for row, found in sessions.log_ratios.items()} == {"a/same/s": 12, "a/slow/s": 12}


def test_only_slow_modes_are_open_after_rows_are_same() -> None:
    """False before the first look, and after a session with a slow process, which must be measured in full."""
    plan = SessionPlan(rules=(SessionRule("a/watched/*", watch=True),))
    even = [0.001, -0.001] * 3
    slow = [*even, math.log(2)]

    def state(readings: Sequence[float]) -> Sessions:
        return Sessions({"a/watched/s": "t::a"}, plan, plan.budget, {"a/watched/s": list(readings)})

    assert [state(x).only_slow_modes_open for x in (even[:4], even, slow)] == [False, True, False]
    assert state(even).open_rows() == ["a/watched/s"]


def test_cache_pairs_alternate_and_are_kept_with_readings() -> None:
    sessions = Sessions({"a/b/s": "t::a"}, SessionPlan(), 6, cache_pairs=2)
    used, lose = [], iter([False, False, True, False] + [False] * 20)

    def process(side: str, tests: Sequence[str]) -> TimedReading:
        used.append((side, sessions.cache))
        return TimedReading({} if next(lose) else {"a/b/s": 1.0 + 0.1 * len(used)})

    for _ in range(5):
        sessions.run_one(process)
    assert [pair for _, pair in used] == [0, 0, 1, 0, 0, 1, 1, 0, 0]
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
    assert requested[0] == requested[1] == ["t::k0", "t::step"]
    assert [row for row, found in sessions.log_ratios.items() if found] == [
        "kernels/k0/s",
        "throughput/step/s",
    ]


@pytest.mark.parametrize(
    ("adopted", "candidate", "called"), [(0, 7, False), (0, 8, True), (8, 0, False), (8, 12, False)]
)
def test_unequal_losses_are_reported_at_their_level(adopted: int, candidate: int, called: bool) -> None:
    sessions = Sessions(
        {"a/b/s": "t::a"},
        SessionPlan(),
        72,
        lost_processes={"t::a": {"adopted": adopted, "candidate": candidate}},
    )
    assert bool(sessions.unequal_losses()) is called


@pytest.mark.parametrize(
    ("judgement", "expected"),
    [
        (seconds(4.0), 4.0),
        (
            Judgement(Row("a/b/c", 4.0, "x", 1, "C1", better="higher", interval=(3.9, 4.1)), Verdict.WIN, ""),
            0.25,
        ),
        (seconds(4.0, spread=0.4), None),
        (seconds(-4.0, spread=-0.01), None),
        (Judgement(seconds(4.0).row, Verdict.INSTRUMENT, ""), None),
        (Judgement(seconds(4.0).row, Verdict.MISSING, "not reviewed"), None),
        (count(4), None),
        (gone(), None),
    ],
    ids=["time", "rate", "rough", "negative", "instrument", "unreviewed", "count", "gone"],
)
def test_cost_is_the_time_of_a_valid_timed_row(judgement: Judgement, expected: float | None) -> None:
    assert cost(judgement) == expected


def test_short_plan_spends_the_full_level_by_its_last_look() -> None:
    assert plan_for() == plan_for(99)
    short = plan_for(10)
    assert [look.sessions for look in short.looks] == [6, 8, 10]
    assert sum(look.different for look in short.looks) == sum(look.same for look in short.looks) == 1
    assert plan_for(6).looks[0].different == 1
    with pytest.raises(ValueError, match="at least 6 sessions, got 5"):
        plan_for(5)


def test_slow_modes_are_watched_if_sessions_suffice() -> None:
    assert plan_for(None, True).rule("throughput/a/b").watch
    assert plan_for(None, True).rule("throughput/start-cpu/warm_cpu_seconds").watch
    assert not plan_for(None, True).rule("throughput/start-cpu/cold_cpu_seconds").watch
    assert not plan_for(12, True).rule("throughput/a/b").watch
    assert not plan_for(None, False).rule("throughput/a/b").watch


def test_plan_of_a_gpu_lane_ends_earlier_and_has_its_margins() -> None:
    plan = plan_for(None, False, "cuda", [("a/noisy-*", 0.2), ("throughput/start-*", 0.3)])
    assert (plan.settle, plan_for(None, True).settle) == (8, 16)
    noisy = plan.rule("a/noisy-1/rate")
    assert (noisy.same, noisy.different, noisy.weight, noisy.rare) == (0.2, 0.02, 0.1, 0.2)
    assert plan.rule("throughput/start-h200/cold_cpu_seconds").same == 0.3, "before the rules of all lanes"
    assert plan.rule("a/quiet/rate").same == SessionPlan().same


def test_timing_without_a_quiet_round_raises_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: such a timing gave a ratio of 1: as a rate over the anchor, a WIN by a factor of 8."""
    monkeypatch.setenv("BUMPGATE_ROUNDS", "3")
    ran: list[str] = []
    kept = timing.interleaved({"a": lambda: ran.append("a")}, 40)
    assert kept.quiet + kept.disturbed + 1 == len(ran)
    assert kept.quiet == 3
    clock = iter(range(10**6))
    monkeypatch.setattr(timing, "_busy_seconds", lambda: float(next(clock)))
    with pytest.raises(InfraError, match="rounds was quiet: other processes use this machine"):
        timing.interleaved({"a": lambda: None}, 40, budget=0.05)


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
    """Starts that compile if the folder of the caches is new; no process is started. made: what each compiled."""

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


def test_warm_start_that_compiles_again_is_not_repeated(begun: Starts) -> None:
    """Otherwise a cache that now and then misses is never seen: the second process would hit."""
    starts.cold_start(LANES["cpu"])
    begun.cached = False
    assert starts.warm_start(LANES["cpu"])["compiled"] == 3
    assert begun.made == [3, 3]


def test_caches_of_another_build_are_filled_again(begun: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.cold_start(LANES["cpu"])
    monkeypatch.setattr(starts, "_made_by", lambda: {"torch": "2.14.1"})
    starts.warm_start(LANES["cpu"])
    assert begun.made == [3, 3, 0]


@pytest.mark.parametrize(("empty", "made"), [(False, [3, 0]), (True, [3, 3, 0])], ids=str)
def test_both_sides_fill_empty_caches(
    empty: bool, made: list[int], begun: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.cold_start(LANES["cpu"])
    monkeypatch.setattr(starts, "partner", lambda: OtherSide(empty))
    starts.warm_start(LANES["cpu"])
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
    while sessions.open_rows():
        costs = {ROWS[0]: 1.0} if sessions.started == 0 else {}
        sessions.run_one(lambda side, tests, costs=costs: TimedReading(costs))
    assert sessions.started == 6


def test_fill_gives_each_process_similar_times() -> None:
    known = {"a": 50.0, "b": 20.0, "c": 20.0, "d": 10.0}
    assert balanced(["d", "c", "b", "a"], known, 2) == [["a"], ["c", "b", "d"]]
    assert balanced(["x", "y", "z"], {}, 2) == [["x", "z"], ["y"]]
    assert balanced(["new", "d"], known, 3) == [["new"], ["d"], []], "a new test takes the mean, 25 s"


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
    outcomes: dict[str, TimedOutcome] = {}
    for begun in range(0, DECIDED, AT_ONCE):
        open_rows = [
            row for row in have if outcomes.get(row, TimedOutcome.INCONCLUSIVE) is TimedOutcome.INCONCLUSIVE
        ]
        tests = {TESTS[row] for row in open_rows}
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
    print("rows open after", DECIDED, "sessions:", sorted(still_open))
    assert statistics.median(still_open) <= 2
