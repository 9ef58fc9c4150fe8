"""Seventy training steps: nothing compiles after warm-up, and the overflow counter is state that no guard checks.

Rules C3 (limits are tripwires), C8 (no mutable Python state), C27 (program budget).
"""

from __future__ import annotations

import pytest

from launch.contract import load
from launch.step import make_optimizer, train_step
from suites.compile.expectations import expected
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

INSTRUMENTS = ("graphs", "graph_breaks", "recompiles", "recompile_limit")


@lanes("cpu", "h200")
@pytest.mark.long(50)
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_no_recompiles_in_seventy_steps(lane: Lane, name: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    contract = load()
    steps = contract.recompile_budget_steps
    assert steps == 70 > contract.dynamo["recompile_limit"], (
        "as the row ids say, and enough to reach the limit"
    )
    with watched_hybrid(name, "regional", device=lane.device) as hybrid:
        optimizer = make_optimizer(hybrid.model)
        hybrid.compiled.warm_up(token_batch(hybrid.config, 2, device=lane.device))
        after_warmup = hybrid.report().unique_graphs
        for step in range(steps):
            train_step(
                hybrid.compiled, optimizer, token_batch(hybrid.config, 2, seed=step, device=lane.device)
            )
        report = hybrid.report()
    case = f"compile/{name}-regional-70_steps"
    want = expected(hybrid.config.kinds, "regional")
    row.count(
        f"{case}/unique_graphs", report.unique_graphs, expected=want.unique_graphs, rule="C27", seen=report
    )
    row.count(
        f"{case}/graphs_after_warmup", report.unique_graphs - after_warmup, expected=0, rule="C8", seen=report
    )
    row.count(f"{case}/limit_hits", len(report.failures), expected=0, rule="C3", seen=report)


@lanes("cpu", "h200")
def test_compiled_overflow_count_equals_eager(lane: Lane, row, canaries) -> None:
    """With too small a capacity, compiled and eager count the same drops, in a non-persistent buffer."""
    canaries("graphs")
    tight = {
        "capacity_factor": 1.0,
        "top_k": 4,
    }  # 4 slots per expert for 4 on average: skewed routing overflows
    with watched_hybrid("nam12", "regional", device=lane.device, **tight) as hybrid:
        eager = build(hybrid.config, lane.device)
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        before = hybrid.model.overflow()
        for _ in range(3):
            hybrid.compiled(ids)
            eager(ids)
        counted, known = hybrid.model.overflow() - before, eager.overflow()
        graphs = hybrid.report().unique_graphs
    saved = [key for key in hybrid.model.state_dict() if "overflow" in key]
    row.bound(
        "compile/nam12-regional-tight/overflow_count_difference", counted - known, "pairs", expected=0,
        rule="C8", seen=known,
    )  # fmt: skip
    row.count("compile/nam12-regional-tight/saved_counters", saved, expected=0, rule="C8", seen=graphs)
