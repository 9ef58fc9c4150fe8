"""Error rates of the paired test, from replays of recorded sessions: `python -m tools.replay [GATES] [SEED]`

A recorded session of two equal builds is drawn with replacement, and its sides are swapped with probability 1/2 (they
are exchangeable). Added are an injected slowdown, slow processes of the candidate, and a bias of each compile cache.
The table is printed in Markdown, with the 95 % Wilson interval for each rate.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bumpgate.core.findings import TimedOutcome
from bumpgate.gate.modes import p_lost
from bumpgate.gate.plan import Family, SessionPlan, plan_for
from bumpgate.gate.sequential import decide
from bumpgate.gate.timed import ALPHA_LOST
from tests.support.simulation import wilson
from tools.recorded import FIXED_STARTS, PLACE, WHOLE, Session, by_test, sessions, test_of

EAGER = "throughput/nam52-eager/tokens_per_anchor"
SPEEDUP = "throughput/nam52-regional/speedup_over_eager"
COMPILED = "throughput/nam52-regional/tokens_per_anchor"
ROWS = (EAGER, SPEEDUP, COMPILED)
WARM = "throughput/start-cpu/warm_cpu_seconds"
RED = (TimedOutcome.SLOWER, TimedOutcome.SLOW_MODE)


@dataclass(frozen=True)
class Case:
    """Injected effects. slower: row -> factor of its time. slow: share of the candidate's processes that take `factor`
    times as long in the rows `slow_rows`; each test has its own processes. rough: share of the candidate's processes
    that are lost. cache_sd: standard deviation of the bias of each side's cache. rows: 3 of one test, or more in tests
    of 3. lane: the plan's lane. recorded: file of the gates whose rows and tests are all replayed, in place of `rows`
    copies of training steps.
    """

    name: str
    slower: Mapping[str, float] = field(default_factory=dict)
    slow: float = 0.0
    factor: float = 2.0
    rough: float = 0.0
    cache_sd: float = 0.0
    rows: int = 3
    lane: str = "cpu"
    recorded: Path | None = None
    slow_rows: tuple[str, ...] = (SPEEDUP, COMPILED)


def whole_gate(kept: Sequence[dict[str, Any]]) -> tuple[Case, ...]:
    """Return the cases of all timed rows of the CPU lane together, as in these gates."""
    rows = sorted({row for gate in kept for row in gate["log_ratios"]})
    steps, cold, warm = ([r for r in rows if test_of(r) == test] for test in ("step", "cold", "warm"))
    return (
        Case(f"{len(rows)} rows, unchanged", recorded=WHOLE),
        *(
            Case(f"{len(rows)} rows, +5 % {row.split('/', 1)[1]}", {row: 1.05}, recorded=WHOLE)
            for row in rows
        ),
        *(
            Case(
                f"{len(rows)} rows, 10 % of {name} 2x slower",
                slow=0.1,
                recorded=WHOLE,
                slow_rows=tuple(chosen),
            )
            for name, chosen in (
                ("steps", steps),
                ("cold starts", cold),
                ("warm starts", warm),
                ("all processes", rows),
            )
        ),
    )


CASES = (
    Case("unchanged"),
    *(
        Case(f"+{percent} % {row.split('/', 1)[1]}", {row: 1 + percent / 100})
        for percent in (5, 4, 3)
        for row in ROWS
    ),
    Case("-2.6 % compiled rows", {SPEEDUP: 1 / 1.026, COMPILED: 1 / 1.026}),
    Case("+5 % compiled rows", {SPEEDUP: 1.05, COMPILED: 1.05}),
    Case("+5 % every step", {EAGER: 1.05, COMPILED: 1.05}),
    *(Case(f"{100 * share:g} % of processes 2x slower", slow=share) for share in (0.05, 0.1, 0.2)),
    Case("15 % of processes 1.5x slower", slow=0.15, factor=1.5),
    Case("40 % of processes too rough", rough=0.4),
    *(Case(f"cache bias sd {100 * sd:g} % a side", cache_sd=sd) for sd in (0.005, 0.01)),
    *whole_gate(json.loads(WHOLE.read_text(encoding="utf-8"))),
    Case("starts, fixed cores, unchanged", recorded=FIXED_STARTS),
    Case("starts, fixed cores, +20 % warm", {WARM: 1.2}, recorded=FIXED_STARTS),
    *(
        Case(
            f"starts, fixed cores, {100 * s:g} % of warm ones 2x slower",
            slow=s,
            recorded=FIXED_STARTS,
            slow_rows=(WARM,),
        )
        for s in (0.1, 0.3)
    ),
)
LARGE = (
    Case("71 rows, unchanged", rows=71, lane="h200"),
    Case("71 rows, +5 % nam52-eager", {EAGER: 1.05}, rows=71, lane="h200"),
    Case("71 rows, cache bias sd 0.5 %", cache_sd=0.005, rows=71, lane="h200"),
    Case("71 rows, cache bias sd 1 %", cache_sd=0.01, rows=71, lane="h200"),
)


def gate(case: Case, recorded: Mapping[str, Sequence[Session]], rng: random.Random) -> tuple[str, int]:
    """Simulate one gate: its decision on the timed rows, and its number of sessions.

    recorded: test -> its sessions; "" for every other test.
    """
    plan: SessionPlan = plan_for(None, case.lane)
    if case.recorded:
        tests = {row: test for test, found in recorded.items() for row in found[0]}
        origin = {row: row for row in tests}
    else:
        origin = {
            (row if i < 3 else row.replace("throughput/nam52", f"kernels/k{i // 3}")): row
            for i, row in enumerate((ROWS * (case.rows // 3 + 1))[: case.rows])
        }
        tests = {name: f"test{i // 3}" for i, name in enumerate(origin)}
    bias = {
        name: [rng.gauss(0, case.cache_sd) - rng.gauss(0, case.cache_sd) for _ in range(2)] for name in origin
    }
    readings: dict[str, list[float]] = {name: [] for name in origin}
    caches: dict[str, list[int]] = {name: [] for name in origin}
    outcomes = dict.fromkeys(origin, TimedOutcome.INCONCLUSIVE)
    looks = sorted({look.sessions for look in plan.looks} | {*range(28, plan.budget, 4)})
    begun = lost = 0
    for look in looks:
        still = {tests[name] for name, outcome in outcomes.items() if outcome is TimedOutcome.INCONCLUSIVE}
        while any(len(readings[name]) < look for name in origin if tests[name] in still):
            pair, begun = begun % 2, begun + 1
            if rng.random() < case.rough:
                lost += 1
                continue
            slow = {
                test: math.log(case.factor) if rng.random() < case.slow else 0.0
                for test in sorted({tests[row] for row in case.slow_rows if row in tests})
            }
            drawn = {
                test: (rng.choice(recorded.get(test) or recorded[""]), rng.choice((-1, 1)))
                for test in sorted(still)
            }
            for name, row in origin.items():
                if tests[name] in still:
                    session, sign = drawn[tests[name]]
                    planted = math.log(case.slower.get(name, 1.0))
                    planted += slow.get(tests[name], 0.0) if row in case.slow_rows else 0.0
                    readings[name].append(sign * session[row] + planted + bias[name][pair])
                    caches[name].append(pair)
        outcomes = decide(readings, plan, Family(tests, caches))
        if TimedOutcome.INCONCLUSIVE not in outcomes.values():
            break
    if any(outcome in RED for outcome in outcomes.values()) or (lost and p_lost(lost, 0) <= ALPHA_LOST):
        return "HOLD", begun
    return ("UNKNOWN" if TimedOutcome.INCONCLUSIVE in outcomes.values() else "ADOPT"), begun


def rates(case: Case, gates: int, seed: int) -> tuple[Counter[str], list[int]]:
    """Return the count of each decision, and the sessions of each gate in ascending order."""
    kept = json.loads((case.recorded or PLACE).read_text(encoding="utf-8"))
    recorded = by_test(kept) if case.recorded else {"": sessions(kept)}
    rng = random.Random(f"{seed} {case.name}")
    games = [gate(case, recorded, rng) for _ in range(gates)]
    return Counter(decision for decision, _ in games), sorted(begun for _, begun in games)


def main(gates: int = 1000, seed: int = 1) -> None:
    print("| planted | gates | HOLD | UNKNOWN | ADOPT | sessions, median and 95th percentile |")
    print("|---|---|---|---|---|---|")
    for case in (*CASES, *LARGE):
        runs = max(1, gates // 10) if case in LARGE else gates
        found, used = rates(case, runs, seed)
        cells = []
        for decision in ("HOLD", "UNKNOWN", "ADOPT"):
            low, high = wilson(found[decision], runs)
            cells.append(f"{found[decision] / runs:.1%} [{low:.1%}, {high:.1%}]")
        typical = f"{used[runs // 2]}, {used[runs * 19 // 20]}"
        print(f"| {case.name} | {runs} | {' | '.join(cells)} | {typical} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
