"""The experts' combine keeps fp32 for both the multiply and the sum.

Rule C33: a bf16 multiply exploded the loss from 15 to 5014 in four steps. The bound is applied to the fp32 output
before the cast, where it separates right from wrong by more than 230x. CPU index_add hides a bf16 accumulator (it sums
wider inside), so the accumulator's dtype is read from the FX graph as well.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.moe_combine import moe_combine, moe_combine_eager
from suites.support.lanes import Lane, lanes

T, D, E, K = 512, 128, 64, 6
BOUND = 1e-5


def routed(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return expert outputs (E, C, D) bf16, expert and slot (1,T,K), weights (1,T,K) fp32, bucket C."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(1, T, E, generator=generator)
    weights, expert = scores.topk(K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    position = torch.nn.functional.one_hot(expert, E).flatten(1, 2).cumsum(1).sub(1).unflatten(1, (T, K))
    slot = position.gather(-1, expert.unsqueeze(-1)).squeeze(-1)
    bucket = 1 << int(slot.max()).bit_length()
    values = torch.randn(1, T, K, D, generator=generator)
    if kind == "cancelling":
        # Experts that cancel except for 5 %: the error of a short accumulator grows relative to the remainder.
        sign = torch.tensor([1.0, -1.0] * (K // 2))[:, None]
        values = torch.randn(1, T, 1, D, generator=generator) * sign + 0.05 * values
        weights = torch.full_like(weights, 1 / K)
    y = torch.zeros(E, bucket, D)
    y[expert.flatten(), slot.flatten()] = values.flatten(0, 2)
    return y.bfloat16(), expert, slot, weights, bucket


@lanes("cpu", "h200")
@pytest.mark.parametrize("kind", ["random", "cancelling"])
def test_error_before_the_cast(lane: Lane, kind: str, row) -> None:
    y, expert, slot, weights, bucket = (
        t.to(lane.device) if isinstance(t, Tensor) else t for t in routed(kind)
    )
    out = moe_combine(y, expert, slot, weights, bucket, out_dtype=torch.float32)
    rows = y.double()[expert, slot]
    oracle = (rows * weights.double().unsqueeze(-1)).sum(2)
    error = float((out.double() - oracle).norm() / oracle.norm())
    row(
        f"numerics/moe_combine-{kind}/error_before_cast",
        error,
        unit="ratio",
        witness=int((slot >= 0).sum()),
        rule="C33",
        at_most=BOUND,
        evidence=(
            "a bf16 multiply or sum reads 2e-3 (random) and 3e-2 (cancelling) here: kernels/moe_combine",
        ),
    )


@lanes("cpu")
def test_accumulator_dtype_in_the_graph(lane: Lane, row) -> None:
    y, expert, slot, weights, bucket = routed("random")
    graph = make_fx(lambda *a: moe_combine_eager(*a, bucket))(y, expert, slot, weights)
    sums = (
        "aten.index_add",
        "aten.scatter_add",
        "aten.index_put",
        "aten.sum",
        "aten.mul",
        "aten.bmm",
        "aten.einsum",
    )
    found = [
        (str(n.target), n.meta["val"].dtype)
        for n in graph.graph.nodes
        if n.op == "call_function" and str(n.target).startswith(sums) and n.meta["val"].is_floating_point()
    ]
    narrow = [f"{name} accumulates in {dtype}" for name, dtype in found if dtype != torch.float32]
    row(
        "numerics/moe_combine-graph/narrow_accumulators",
        len(narrow),
        unit="count",
        witness=len(found),
        rule="C33",
        expected=0,
        evidence=narrow or [f"{name} in {dtype}" for name, dtype in found],
    )
