"""Inputs of the grouped_gemm suites.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm.naive import grouped_gemm_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal

COUNTS = (5, 0, 17, 8)


def make_inputs(
    counts: Sequence[int] = COUNTS, D_in=8, D_out=16, spare=3, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x with `spare` unassigned rows at the end, weight, and the counts as int64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts) + spare, D_in, generator=g, dtype=torch.float64)
    weight = torch.randn(len(counts), D_in, D_out, generator=g, dtype=torch.float64)
    return x.to(device, dtype), weight.to(device, dtype), torch.tensor(counts, device=device)


def refusals(x: Tensor, weight: Tensor, counts: Tensor) -> list[Refusal]:
    return [
        ((x[None], weight, counts), {}, "3-d"),
        ((x, weight[0], counts), {}, "2-d"),
        ((x, weight[:, :7], counts), {}, "x has shape"),
        ((x, weight, counts[1:]), {}, "counts has shape"),
        ((x, weight[..., :0], counts), {}, "no side may be empty"),
        ((x.float(), weight, counts), {}, "one float dtype"),
        ((x.int(), weight.int(), counts), {}, "one float dtype"),
        ((x, weight, counts.short()), {}, "int32 or int64"),
        ((x, weight, counts), {"bucket": 8}, "bucket is for impl 'padded'"),
        ((x, weight, counts), {"impl": "padded", "bucket": 0}, "at least 1"),
    ]


# The Triton kernels load full chunks of 64 by TMA, and other sizes by plain loads.
DIMS = {"odd": (20, 25), "tall tiles": (64, 128), "wide tiles": (192, 256)}
OP = FormulaOp(
    name="grouped_gemm",
    run=grouped_gemm,
    formula=grouped_gemm_naive,
    make_inputs=make_inputs,
    cases={name: Case({"D_in": D_in, "D_out": D_out}) for name, (D_in, D_out) in DIMS.items()},
    gradcheck={"an empty expert": Case({"counts": (2, 0, 3), "D_in": 3, "D_out": 2, "spare": 1})},
    batches=[{"spare": spare} for spare in (2, 3, 5)],
    dynamic=(0,),
    refusals=refusals,
    forms=("op", "eager", "padded"),
)
