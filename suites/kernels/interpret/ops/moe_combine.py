"""The interpreted kernels of moe_combine.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_combine import kernel
from kernels.moe_combine.eager import moe_combine_backward_eager, moe_combine_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.kernels.interpret.ratio import DTYPES

SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]


def make_inputs(B: int, T: int, K: int, E: int, D: int, C: int, dtype: torch.dtype) -> Named:
    """Slots in token order, -1 if the bucket is full; noise in unused rows of y."""
    g = torch.Generator().manual_seed(T)
    expert = (torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)).topk(K, -1).indices
    mine = expert.flatten(1).unsqueeze(-1) == torch.arange(E)
    slot = (mine.cumsum(1) - 1).gather(2, expert.flatten(1).unsqueeze(-1)).view_as(expert)
    slot = slot.where(slot < C, -1)
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    dout = torch.randn(B, T, 2 * D, generator=g, dtype=torch.float64).to(dtype)[..., ::2]
    weights = torch.rand(B, T, K, generator=g)
    return {"y": y, "expert": expert, "slot": slot, "weights": weights, "dout": dout, "bucket": C}


def forward(y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int) -> Tensor:
    return kernel.moe_combine_fwd_kernel(y, expert, slot, weights, bucket, y.dtype)


OP = KernelOp(
    name="moe_combine",
    launched=passes(forward, kernel.moe_combine_bwd_kernel),
    reference=passes(moe_combine_eager, moe_combine_backward_eager),
    make_inputs=make_inputs,
    blocks={(kernel, name): 16 for name in ("FORWARD_BLOCK", "BACKWARD_BLOCK", "OWNERS_BLOCK")},
    dtypes=tuple(DTYPES),
    cases=[*map(Case, SIZES)],
    # The sizes with dropped assignments.
    faulty=[Case(SIZES[1]), Case(SIZES[3])],
    faults={"dropped ones": Fault({"slot": lambda slot: slot.clamp(min=0)})},
    layouts=[Case(SIZES[1])],
)
