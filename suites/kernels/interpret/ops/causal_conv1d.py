"""The interpreted kernels of causal_conv1d.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d import kernel
from kernels.causal_conv1d.eager import causal_conv1d_backward_eager, causal_conv1d_eager
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.kernels.interpret.ratio import DTYPES

SMALL = {"SPAN": 4, "BD": 16}
CASES = [(1, 4, "silu"), (2, 3, "none"), (6, 1, "silu"), (8, 5, "none"), (11, 4, "silu")]  # T, W, activation


def make_inputs(T: int, W: int, dtype: torch.dtype, D: int = 20) -> Named:
    """x is a slice of a wider row, dy has other strides; documents begin at random, ids go 0, 1, 0, 1."""
    g = torch.Generator().manual_seed(T)
    x, dy = (torch.randn(2, T, D + 7, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(D, W, generator=g, dtype=torch.float64).to(dtype)
    bias = torch.randn(D, generator=g, dtype=torch.float64).to(dtype)
    doc_ids = (torch.rand(2, T, generator=g) < 0.2).int().cumsum(1).int() % 2
    x, dy = x[..., 3 : 3 + D], dy[..., :D]
    return {"x": x, "weight": weight, "bias": bias, "doc_ids": doc_ids, "dy": dy, "activation": "silu"}


OP = KernelOp(
    name="causal_conv1d",
    launched=passes(kernel.causal_conv1d_fwd_kernel, kernel.causal_conv1d_bwd_kernel),
    reference=passes(causal_conv1d_eager, causal_conv1d_backward_eager),
    make_inputs=make_inputs,
    blocks={(kernel, name): getattr(kernel, name) | SMALL for name in ("FORWARD", "BACKWARD")},
    dtypes=tuple(DTYPES),
    cases=[Case((T, W), {"activation": activation}) for T, W, activation in CASES],
    faulty=[Case((11, 4), dtypes=("fp16",))],
    faults={"documents": Fault({"doc_ids": torch.zeros_like})},
    poisoned=[Case((11, 4), dtypes=("fp32",))],
    per_token=("x",),
    layouts=[Case((11, 4), dtypes=("fp16",))],
)
