"""The interpreted kernels of cross_entropy.

N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cross_entropy import kernel
from kernels.cross_entropy.eager import cross_entropy_backward_eager, cross_entropy_with_sums
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, Outputs

# None, "fast" for fp16, "fast" at its limit, "exact".
SOFTCAPS = (0.0, 3.0, 32.0, 50.0)
IGNORE = -100


def make_inputs(V: int, dtype: torch.dtype, saturated: bool = False, shift: float = 0.0, N: int = 4) -> Named:
    """logits are a slice of wider rows; row 2 is ignored, and holds nan.

    saturated: tanh is 1 to the last bit in row 0, where its exponential would overflow. shift: added to rows 0 and 1.
    """
    g = torch.Generator().manual_seed(V)
    logits = (torch.randn(N, V + 7, generator=g, dtype=torch.float64) * 4.0).to(dtype)[:, 3 : 3 + V]
    target = torch.randint(0, V, (N,), generator=g)
    logits[2], target[2] = torch.nan, IGNORE
    if saturated:
        logits[0, ::2], logits[0, 1::2] = 6e4, -6e4
    logits[:2] += shift
    dloss = torch.randn(N, generator=g, dtype=torch.float64).to(torch.float32)
    return {"logits": logits, "target": target, "dloss": dloss}


def both_passes(forward: Callable, backward: Callable) -> Callable[..., Outputs]:
    """Return a function that returns loss, logsumexp, gradient."""

    def run(logits, target, dloss, softcap):
        loss, shift, total = forward(logits, target, softcap, IGNORE)
        dlogits = backward(logits, target, shift, total, dloss, softcap, IGNORE)
        return loss, shift + total.log(), dlogits

    return run


def _capped(logits: Tensor) -> Tensor:
    return (3 * torch.tanh(logits / 3)).to(logits.dtype)


OP = KernelOp(
    name="cross_entropy",
    launched=both_passes(kernel.cross_entropy_fwd_kernel, kernel.cross_entropy_bwd_kernel),
    reference=both_passes(cross_entropy_with_sums, cross_entropy_backward_eager),
    make_inputs=make_inputs,
    # Tiles of 128 entries, and the fast softcap for all but the smallest vocabulary.
    blocks={(kernel, "LANES"): 32, (kernel, "SMALLEST_FAST_V"): 100},
    cases=[
        *(Case((V,), {"softcap": softcap}) for softcap in SOFTCAPS for V in (1, 101, 256, 300)),
        *(Case((300,), {"softcap": c}, {"saturated": True}, dtypes=("fp16",)) for c in (3.0, 32.0)),
        Case((133,), {"softcap": 0.0}, {"shift": 3e4}),
    ],
    faulty=[Case((133,), {"softcap": 3.0})],
    faults={
        "softcap": Fault({"softcap": 3.1}),
        "target": Fault({"target": lambda t: t.where(t < 0, (t + 1) % 133)}, spares=(1,)),
        "slope of the cap": Fault({"logits": _capped, "softcap": 0.0}, unseen=(0, 1)),
        "last entry": Fault(
            {"logits": lambda x: x[:, :132], "target": lambda t: t.where(t < 0, t % 132)}, unseen=(2,)
        ),
        "3 % of the gradient": Fault({"dloss": lambda d: d * 1.03}, spares=(0, 1)),
    },
    layouts=[Case((133,), {"softcap": 3.0}, dtypes=("fp16",))],
    expanded=[Case((133,), {"softcap": 3.0}, dtypes=("fp16",))],
    gradient="dloss",
    # Those of the ignored row.
    zeros=lambda arguments, loss, lse, dlogits: (loss[2], dlogits[2]),
)
