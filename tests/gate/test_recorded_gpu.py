"""Sessions of a real gate on four H200s, and gates drawn from their noise: what the plan of that lane decides."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter

import pytest

from bumpgate.core import lanes
from bumpgate.core.findings import TimedOutcome
from bumpgate.gate.plan import Family, plan_for
from bumpgate.gate.sequential import decide
from tests.support.simulation import rate_text
from tests.support.tree import ROOT

RECORDED: dict[str, list[str | float]] = json.loads(
    (ROOT / "tests/gate/recorded_gpu_sessions.json").read_text()
)["rows"]
TESTS = {row: str(values[0]) for row, values in RECORDED.items()}
SESSIONS = {row: [float(x) for x in values[1:]] for row, values in RECORDED.items()}
LANE = lanes.require(ROOT, "h200")
PLAN = plan_for(None, LANE.name, LANE.device, LANE.margins)
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
