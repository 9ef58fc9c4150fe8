"""The interpreted kernels of grouped_gemm.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.grouped_gemm import kernel
from kernels.grouped_gemm.eager import grouped_gemm_backward_eager, grouped_gemm_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, Outputs, passes

# Chunks of 32, in wide tiles one way and in tall tiles the other; then two that no descriptor fits.
DIMS = [(32, 128), (64, 32), (20, 35), (1, 3)]
RAGGED = (5, 0, 40, 9)
ROUTINGS = [RAGGED, (16, 32, 0), (0, 0, 35, 0), (0, 0, 0, 0)]  # the second one is whole tiles
TILES = {"WIDE": (16, 64, 32), "TALL": (32, 32, 32), "PLAIN": (16, 32, 32)}


def make_inputs(counts: Sequence[int], D_in: int, D_out: int, dtype: torch.dtype, spare: int = 8) -> Named:
    """The unassigned rows at the end hold nan."""
    g = torch.Generator().manual_seed(D_in)
    used = sum(counts)
    x, dy = (torch.randn(used + spare, D, generator=g, dtype=torch.float64).to(dtype) for D in (D_in, D_out))
    x[used:] = dy[used:] = torch.nan
    weight = torch.randn(len(counts), D_in, D_out, generator=g, dtype=torch.float64).to(dtype)
    return {"x": x, "weight": weight, "counts": torch.tensor(counts), "dy": dy}


def unassigned(arguments: Named, y: Tensor, dx: Tensor, dweight: Tensor) -> Outputs:
    """Return the results of rows without an expert, and of experts without a row."""
    counts = arguments["counts"]
    return y[counts.sum() :], dx[counts.sum() :], dweight[counts == 0]


OP = KernelOp(
    name="grouped_gemm",
    launched=passes(kernel.grouped_gemm_fwd_kernel, kernel.grouped_gemm_bwd_kernel),
    reference=passes(grouped_gemm_eager, grouped_gemm_backward_eager),
    make_inputs=make_inputs,
    blocks={
        (kernel, "PROGRAMS"): 3,
        (kernel, "PLAN_TILES"): 8,
        (kernel, "GROUP"): 2,
        **{
            (kernel, name): getattr(kernel, name) | dict(zip(("BM", "BN", "BK"), tile))
            for name, tile in TILES.items()
        },
    },
    cases=[Case((counts, *dims)) for dims in DIMS for counts in ROUTINGS],
    faulty=[
        Case((RAGGED, *dims), inputs={"spare": 0}, dtypes=(dtype,))
        for dtype, dims in [("fp32", DIMS[2]), ("fp16", DIMS[0]), ("fp16", DIMS[1])]
    ],
    faults={
        "a row too many": Fault({"counts": lambda counts: counts + torch.tensor([1, 0, -1, 0])}),
        "next expert's matrix": Fault({"weight": lambda weight: weight.roll(1, 0)}, spares=(2,)),
        "3 % of x": Fault({"x": lambda x: x * 1.03}, spares=(1,)),
        "last row of dy": Fault({"dy": lambda dy: dy.index_fill(0, torch.tensor([53]), 0)}, spares=(0,)),
    },
    layouts=[Case((RAGGED, *dims), inputs={"spare": 0}, dtypes=("fp16",)) for dims in DIMS[1:3]],
    zeros=unassigned,
)
