"""Inputs of the moe_combine suites.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_combine import moe_combine
from kernels.moe_combine.naive import moe_combine_naive
from kernels.moe_dispatch import moe_dispatch
from suites.kernels.formula_op import Case, FormulaOp, Refusal

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]


def make_inputs(
    B=2, T=24, K=3, D=8, E=6, C=8, dtype=torch.float64, device="cpu", seed=0, weights_dtype=None
) -> Inputs:
    """Return y (E,B*C,D) with noise in unused rows too, expert, slot, weights and bucket; a small C drops some."""
    g = torch.Generator().manual_seed(seed)
    scores, expert = torch.rand(B, T, E, generator=g).sub(0.1 * torch.arange(E)).topk(K, -1)
    weights = torch.softmax(scores.double(), -1).to(
        weights_dtype or torch.promote_types(dtype, torch.float32)
    )
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    _, slot, _ = moe_dispatch(torch.zeros(B, T, 1), expert, E, C)
    return *(t.to(device) for t in (y, expert, slot, weights)), C


def refusals(y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, C: int) -> list[Refusal]:
    return [
        ((y, expert, slot, weights.bfloat16(), C), {}, "combine weights stay fp32"),
        ((y, expert, slot, weights.half(), C), {}, "combine weights stay fp32"),
        ((y[0], expert, slot, weights, C), {}, "2-d"),
        ((y, expert, slot, weights, C - 1), {}, "rows per expert"),
        ((y, expert, slot[1:], weights, C), {}, "slot has shape"),
        ((y, expert, slot, weights[..., 1:], C), {}, "weights has shape"),
        ((y, expert, slot.int(), weights, C), {}, "int64"),
        ((y.int(), expert, slot, weights, C), {"out_dtype": torch.float32}, "y must be floating point"),
        ((y, expert, slot, weights, C), {"out_dtype": torch.int32}, "out must be floating point"),
    ]


SMALL = {"T": 4, "K": 2, "D": 2, "E": 3}
OP = FormulaOp(
    name="moe_combine",
    run=moe_combine,
    formula=moe_combine_naive,
    make_inputs=make_inputs,
    cases={"dropped": Case({"C": 3}), "none dropped": Case({"C": 24})},
    gradcheck={f"bucket {C}": Case({**SMALL, "C": C}) for C in (1, 4)},
    bad={"dtype": torch.bfloat16},
    refusals=refusals,
    rounding=1e-13,
)
