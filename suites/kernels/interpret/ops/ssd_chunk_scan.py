"""The interpreted kernels of ssd_chunk_scan.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ssd_chunk_scan import kernel
from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_backward_eager, ssd_chunk_scan_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.support.scans import documents

# The last one is the chunk size.
SIZES = [(2, 37, 6, 8, 12, 2, 16), (1, 66, 6, 5, 8, 2, 64), (1, 18, 2, 16, 16, 1, 64)]


def make_inputs(
    B: int, T: int, H: int, P: int, N: int, G: int, chunk_size: int,
    dtype: torch.dtype, starts: Sequence[int] = (5, 6, 27), seed: int = 0,
) -> Named:  # fmt: skip
    """x, Bmat and Cmat are slices of one row."""
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, to: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    x, Bmat, Cmat = draw(B, T, H * P + 2 * G * N, to=dtype).split([H * P, G * N, G * N], -1)
    A = -torch.rand(H, generator=g) - 0.05
    return {
        "x": x.unflatten(-1, (H, P)), "dt": F.softplus(draw(B, T, H)), "A": A,
        "Bmat": Bmat.unflatten(-1, (G, N)), "Cmat": Cmat.unflatten(-1, (G, N)), "D": draw(H, to=dtype),
        "doc_ids": documents(B, T, starts), "initial_state": draw(B, H, P, N),
        "dy": draw(B, T, H, P, to=dtype), "dfinal": draw(B, H, P, N), "chunk_size": chunk_size,
    }  # fmt: skip


OP = KernelOp(
    name="ssd_chunk_scan",
    launched=passes(kernel.ssd_chunk_scan_fwd_kernel, kernel.ssd_chunk_scan_bwd_kernel),
    reference=passes(ssd_chunk_scan_eager, ssd_chunk_scan_backward_eager),
    make_inputs=make_inputs,
    # Several programs along every axis: the heads of a group in parts, a last block of heads that is not full.
    blocks={(kernel, "PREPARED_HEADS"): 4, (kernel, "ENOUGH_PROGRAMS"): 8},
    cases=[*map(Case, SIZES)],
    faulty=[Case(SIZES[2])],
    # The gradient of D does not depend on the documents.
    faults={"documents": Fault({"doc_ids": torch.zeros_like}, spares=(7,))},
    refused=[Case((1, 2, 1, 129, 8, 1, 64), error="at most 128")],
    two_documents=[Case((1, 21, 2, 8, 8, 1, 64), inputs={"starts": (11,)})],
    per_token=("x", "dt", "Bmat", "Cmat"),
    state=("initial_state",),
    narrow_products=True,
    # The gradient of A has only H values, and the maximum of few errors varies.
    pooled=[{"seed": seed} for seed in range(3)],
    layouts=[Case(SIZES[2], dtypes=("fp16",))],
)
