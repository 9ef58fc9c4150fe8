"""The interpreted kernels of rms_norm_gated.

N rows, D channels, S group size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.rms_norm_gated import kernel
from kernels.rms_norm_gated.eager import rms_norm_gated_backward_eager, rms_norm_gated_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.kernels.interpret.ratio import DTYPES

SIZES = [(1, 8, 8), (7, 40, 40), (33, 40, 8), (5, 20, 10), (9, 2, 1)]  # N D S


def make_inputs(N: int, D: int, dtype: torch.dtype) -> Named:
    """x is a slice of a wider row, gate has no two adjacent channels, dy has other strides."""
    g = torch.Generator().manual_seed(N)
    x, dy, gate = (torch.randn(N, 2 * D, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    weight = torch.randn(D, generator=g, dtype=torch.float64).to(dtype)
    return {"x": x[:, 1 : D + 1], "gate": gate[:, ::2], "weight": weight, "dy": dy[:, :D], "eps": 1e-5}


def cases(sizes: Sequence[tuple[int, int, int]], dtypes: Sequence[str] = ()) -> list[Case]:
    """Return cases of these N, D, S, gated after and before the norm."""
    return [
        Case((N, D), {"group_size": S, "norm_before_gate": first}, dtypes=dtypes)
        for N, D, S in sizes
        for first in (False, True)
    ]


OP = KernelOp(
    name="rms_norm_gated",
    launched=passes(kernel.rms_norm_gated_fwd_kernel, kernel.rms_norm_gated_bwd_kernel),
    reference=passes(rms_norm_gated_eager, rms_norm_gated_backward_eager),
    make_inputs=make_inputs,
    # Several rows per tile if groups are small, several tiles per program, the last one not full.
    blocks={(kernel, "TILE"): 32, (kernel, "FORWARD_WARPS"): 3, (kernel, "BACKWARD_WARPS"): 2},
    dtypes=tuple(DTYPES),
    cases=cases(SIZES),
    faulty=cases(SIZES[1:2], ("fp16",)),
    faults={
        "group size": Fault({"group_size": 20}),
        "order": Fault({"norm_before_gate": lambda first: not first}),
        "eps": Fault({"eps": 0.1}),
    },
    layouts=cases(SIZES[1:2], ("fp16",))[:1],
)
