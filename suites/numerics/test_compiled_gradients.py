"""Compiled against eager by the fp64 ratio (suites/numerics/gradients.py), also in bf16."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from launch.contract import load
from launch.step import make_optimizer, train_step
from model.config import DSAConfig, MLAConfig
from suites.numerics.gradients import FACTOR, ratios_of, report_gradients
from suites.support.hybrids import Watched, build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest, name_of_largest


@lanes("cpu", "h200")
@pytest.mark.parametrize(
    ("name", "policy"), [("nam52", "regional"), ("nam56r", "regional"), ("nam12", "whole_opaque")]
)
@pytest.mark.long(50)
def test_compiled_gradient_error_ratio(lane: Lane, name: str, policy: str, row, canaries) -> None:
    canaries("graphs")
    with watched_hybrid(name, policy, device=lane.device) as hybrid:
        hybrid.compiled.warm_up(token_batch(hybrid.config, 2, device=lane.device))
        report_gradients(row, f"{name}-{policy}", hybrid, lane.device)


# Four layers with every kind of block between them, four times as wide as the narrow presets.
WIDE: dict[str, Any] = {"layer_pattern": "AEMR", "depth": 4, "d_model": 256, "experts": 16, "top_k": 4}
BLOCKS: dict[str, dict[str, Any]] = {
    "gqa-mamba3": {},
    "mla-mimo": {"mla": MLAConfig(16, 16, 16, 16, 16), "m_mixer": "mimo"},
    "dsa-mamba2": {"dsa": DSAConfig((1,), heads=4, width=16, top_k=16), "m_mixer": "mamba2"},
}


@lanes("cpu")
@pytest.mark.parametrize("name", BLOCKS)
def test_bf16_gradients_by_block(lane: Lane, name: str, row, canaries) -> None:
    """In bf16, each kind of compiled block has gradients as near to fp64 as eager's; so have the head and the loss."""
    canaries("graphs")
    with watched_hybrid("nam12", "regional", **WIDE | BLOCKS[name]) as hybrid:
        hybrid.model.bfloat16()
        hybrid.compiled.warm_up(token_batch(hybrid.config, 2))
        ratios, non_finite = ratios_of(hybrid, lane.device)
        calls = hybrid.report().calls
    by_block: dict[str, dict[str, float]] = defaultdict(dict)
    for parameter, ratio in ratios.items():
        by_block[parameter.partition(".")[0]][parameter] = ratio
    for block, of_block in by_block.items():
        row.bound(
            f"numerics/{name}-bf16-{block}/worst_gradient_error_ratio", largest(of_block.values()), "ratio",
            at_most=FACTOR, rule="C36", seen=calls, evidence=(f"worst: {name_of_largest(of_block)}",),
        )  # fmt: skip
    row.count(f"numerics/{name}-bf16/non_finite_gradients", non_finite, expected=0, rule="C33", seen=ratios)


@lanes("cpu")
def test_bf16_loss_over_twenty_steps(lane: Lane, row, canaries) -> None:
    """Trained in bf16, the compiled model stays as near to fp32 as eager does, and its loss falls."""
    canaries("graphs")
    steps = load().deterministic_steps
    with watched_hybrid("nam12", "regional", **WIDE) as hybrid:
        hybrid.model.bfloat16()
        config, batches = hybrid.config, [token_batch(hybrid.config, 2, seed=step) for step in range(steps)]
        hybrid.compiled.warm_up(batches[0])
        hybrid.model.load_state_dict(build(config, dtype=torch.bfloat16).state_dict())
        compiled = losses(hybrid, batches)
        calls = hybrid.report().calls
    eager = losses(build(config, dtype=torch.bfloat16), batches)
    exact = losses(build(config, dtype=torch.bfloat16).float(), batches)
    case = f"numerics/wide-bf16-{steps}_steps"
    seen = {"seen": calls, "evidence": (f"loss {compiled[0]:.4f} -> {compiled[-1]:.4f}",)}
    row.count(f"{case}/finite_losses", sum(map(math.isfinite, compiled)), expected=steps, rule="C33", **seen)
    fall = sum(compiled[:5]) / 5 - sum(compiled[-5:]) / 5
    row.bound(f"{case}/loss_fall", fall, "nats", at_least=0.2, rule="C33", **seen)
    ours, plain = (
        sum((a - b) ** 2 for a, b in zip(run, exact, strict=True)) ** 0.5 for run in (compiled, eager)
    )
    row.bound(f"{case}/loss_error_ratio", ours / plain, "ratio", at_most=FACTOR, rule="C36", **seen)


def losses(trained: Watched | Any, batches: list[torch.Tensor]) -> list[float]:
    """Train a model on the batches, one step each, and return its losses."""
    model, call = (trained.model, trained.compiled) if isinstance(trained, Watched) else (trained, trained)
    optimizer = make_optimizer(model)
    return [float(train_step(call, optimizer, ids)) for ids in batches]
