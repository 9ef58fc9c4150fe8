"""The interpreted kernels of mamba3_siso.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from kernels.mamba3_siso import kernel, kernel_forward
from kernels.mamba3_siso.eager import mamba3_siso_backward_eager, mamba3_siso_eager
from kernels.mamba3_siso.naive import Mamba3State
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, Outputs
from suites.support.scans import documents

# The last one is the chunk size.
SIZES = [
    (2, 37, 2, 8, 12, 1, 3, 16),
    (1, 66, 2, 5, 8, 2, 0, 64),
    (1, 18, 2, 16, 16, 1, 8, 64),
    (2, 19, 2, 8, 12, 1, 6, 16),  # all columns rotate, and fill no power of two
]
# Here the plain formula computes the gradient of adt without a product, so it has no comparable 16-bit error.
ONE_TOKEN = (2, 1, 8, 16, 16, 2, 8, 64)


def make_inputs(
    B: int, T: int, H: int, P: int, N: int, G: int, R: int, chunk_size: int,
    dtype: torch.dtype, starts: Sequence[int] = (5, 6, 27),
) -> Named:  # fmt: skip
    """q and k are slices of one row."""
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(T)

    def draw(*shape: int, to: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    q, k = draw(B, T, G, 2 * N, to=dtype).split(N, -1)
    v, z, dy = (draw(B, T, H, P, to=dtype) for _ in range(3))
    dt = F.softplus(draw(B, T, H))
    adt = -dt * (0.05 + torch.rand(B, T, H, generator=g))
    theta = 2 * math.pi * torch.rand(B, H, R, generator=g)
    return {
        "q": q, "k": k, "v": v, "adt": adt, "dt": dt, "trap": draw(B, T, H),
        "q_bias": draw(H, N), "k_bias": draw(H, N), "angles": draw(B, T, H, R, to=dtype), "D": draw(H, to=dtype),
        "z": z, "doc_ids": documents(B, T, starts),
        "theta": theta, "h": draw(B, H, P, N), "k_prev": draw(B, H, N), "v_prev": draw(B, H, P),
        "dy": dy,
        "dtheta": draw(B, H, R), "dh": draw(B, H, P, N), "dk": draw(B, H, N), "dv": draw(B, H, P),
        "chunk_size": chunk_size,
    }  # fmt: skip


def launched(chunk_size: int, **inputs: Tensor) -> Outputs:
    """Return y, theta, h, k_prev, v_prev, and the gradients."""
    tensors = [*inputs.values()]
    given, dresults = tensors[:16], tensors[16:]
    forward = kernel.mamba3_siso_fwd_kernel(*given, chunk_size)
    return *forward, *kernel.mamba3_siso_bwd_kernel(*given, chunk_size, *dresults)


def reference(chunk_size: int, **inputs: Tensor) -> Outputs:
    tensors = [*inputs.values()]
    given, dy = (*tensors[:12], Mamba3State(*tensors[12:16]), chunk_size), tensors[16]
    y, final = mamba3_siso_eager(*given)
    gradients = [*mamba3_siso_backward_eager(*given, dy, Mamba3State(*tensors[17:]))]
    gradients[10] = gradients[10].to(dy.dtype)
    return y, *final, *gradients


OP = KernelOp(
    name="mamba3_siso",
    launched=launched,
    reference=reference,
    make_inputs=make_inputs,
    # Several programs along every axis, and loops with more than one iteration.
    blocks={
        (kernel, "PREPARED_HEADS"): 1,
        (kernel, "TURNED_TOKENS"): 8,
        (kernel, "TURNED_BLOCKS"): 2,
        (kernel, "SUMMED_TOKENS"): 16,
        (kernel_forward, "BEFORE"): tl.constexpr(2),
    },
    cases=[*map(Case, SIZES), Case(ONE_TOKEN, dtypes=("fp32",))],
    faulty=[Case(SIZES[2])],
    # v_prev and the gradient of D do not depend on the documents.
    faults={"documents": Fault({"doc_ids": torch.zeros_like}, spares=(4, 14))},
    refused=[Case((1, 2, 1, 129, 8, 1, 2, 64), error="at most 128")],
    two_documents=[Case((1, 21, 2, 8, 8, 1, 3, 64), inputs={"starts": (11,)})],
    expanded=[Case((1, 18, 1, 16, 16, 1, 8, 64), dtypes=("fp32",))],
    per_token=("q", "k", "v", "adt", "dt", "trap", "angles", "z"),
    state=("theta", "h", "k_prev", "v_prev"),
    narrow_products=True,
    layouts=[Case(SIZES[2], dtypes=("fp16",))],
)
