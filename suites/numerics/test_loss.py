"""Twenty deterministic steps: the compiled 52-layer hybrid trains, finitely, downward and repeatably."""

from __future__ import annotations

import math

import pytest

from launch.contract import load
from launch.step import make_optimizer, train_step
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest_difference


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_loss_over_twenty_steps(lane: Lane, name: str, row, canaries) -> None:
    canaries("graphs")
    steps = load().deterministic_steps
    with watched_hybrid(name, "regional", device=lane.device) as hybrid:
        batches = [token_batch(hybrid.config, 2, seed=step, device=lane.device) for step in range(steps)]
        hybrid.compiled.warm_up(batches[0])
        fresh = build(hybrid.config, lane.device).state_dict()
        runs = []
        for _ in range(2):
            hybrid.model.load_state_dict(fresh)
            optimizer = make_optimizer(hybrid.model)
            runs.append([float(train_step(hybrid.compiled, optimizer, ids)) for ids in batches])
        calls = hybrid.report().calls
    first, second = runs
    case = f"numerics/{name}-regional-{steps}_steps"
    curve = (f"loss {first[0]:.4f} -> {first[-1]:.4f}",)
    finite = sum(math.isfinite(loss) for loss in first)
    row.count(f"{case}/finite_losses", finite, expected=steps, rule="C33", seen=calls, evidence=curve)
    fall = sum(first[:5]) / 5 - sum(first[-5:]) / 5
    row.bound(f"{case}/loss_fall", fall, "nats", at_least=0.2, rule="C33", seen=calls, evidence=curve)
    apart = largest_difference(first, second)
    row.bound(
        f"{case}/repeat_difference", apart, "nats", expected=0.0, rule="C33", seen=calls, evidence=curve
    )
