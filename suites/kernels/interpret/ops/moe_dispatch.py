"""The interpreted gradient of moe_dispatch; its forward is compared bit by bit (test_moe_dispatch.py).

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_dispatch import kernel
from kernels.moe_dispatch.eager import moe_dispatch_backward_eager, moe_dispatch_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.kernels.interpret.ratio import DTYPES

SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]


def routing(B: int, T: int, K: int, E: int) -> Tensor:
    """Return distinct experts per token, skewed to low ids for uneven buckets, with id 1 unassigned; strided."""
    g = torch.Generator().manual_seed(T)
    scores = torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)
    expert = scores.topk(K, -1).indices
    return expert.where(expert != 1, -1).repeat_interleave(2, -1)[..., ::2]


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def make_inputs(B: int, T: int, K: int, E: int, D: int, C: int, dtype: torch.dtype) -> Named:
    expert = routing(B, T, K, E)
    _, slot, _ = moe_dispatch_eager(torch.zeros(B, T, 1), expert, E, C)
    return {"dpadded": values(E, B * C, D, dtype=dtype), "expert": expert, "slot": slot, "bucket": C}


OP = KernelOp(
    name="moe_dispatch",
    launched=passes(kernel.moe_dispatch_bwd_kernel),
    reference=passes(moe_dispatch_backward_eager),
    make_inputs=make_inputs,
    blocks={(kernel, name): 16 for name in ("SLOTS_BLOCK", "ROWS_BLOCK", "BACKWARD_BLOCK")},
    dtypes=tuple(DTYPES),
    cases=[*map(Case, SIZES)],
    # The sizes with dropped or unassigned ones.
    faulty=[*map(Case, SIZES[1:])],
    faults={
        "dropped ones": Fault({"expert": lambda ids: ids.clamp(min=0), "slot": lambda s: s.clamp(min=0)})
    },
    layouts=[Case(SIZES[1])],
)
