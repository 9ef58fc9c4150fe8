"""The interpreted kernels of m2rnn.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.m2rnn import kernel
from kernels.m2rnn.eager import m2rnn_backward_eager, m2rnn_forward_with_states
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, Outputs, passes
from suites.kernels.interpret.ratio import DTYPES

SIZES = [(1, 1, 1, 1, 1), (2, 7, 2, 6, 4), (1, 13, 2, 5, 3), (1, 9, 1, 4, 16), (2, 3, 1, 3, 20)]


def make_inputs(B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype) -> Named:
    """q and k are slices of one row; ids go 0, 1, 0, 1."""
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(T)

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    q, k = draw(B, T, H, 2 * K).split(K, -1)
    W = draw(H, V, V, to=wide) / V**0.5
    doc_ids = (torch.rand(B, T, generator=g) < 0.3).int().cumsum(1).int() % 2
    f = draw(B, T, H, to=wide).sigmoid()
    v, dy = draw(B, T, H, V), draw(B, T, H, V)
    h0, dfinal = draw(B, H, K, V, to=wide), draw(B, H, K, V, to=wide)
    return {"q": q, "k": k, "v": v, "W": W, "f": f, "doc_ids": doc_ids, "h0": h0, "dy": dy, "dfinal": dfinal}


def forward_reference(q, k, v, W, f, doc_ids, h0) -> Outputs:
    """Return y, the final state and the states."""
    y, states = m2rnn_forward_with_states(q, k, v, W, f, doc_ids, h0)
    return y, states[:, -1], states


OP = KernelOp(
    name="m2rnn",
    launched=passes(kernel.m2rnn_fwd_kernel, kernel.m2rnn_bwd_kernel, "y", "final", "states"),
    reference=passes(forward_reference, m2rnn_backward_eager, "y", "final", "states"),
    make_inputs=make_inputs,
    dtypes=tuple(DTYPES),
    cases=[*map(Case, SIZES)],
    faulty=[Case(SIZES[2], dtypes=("fp16",))],
    faults={"documents": Fault({"doc_ids": torch.zeros_like})},
    layouts=[Case(SIZES[2], dtypes=("fp16",))],
)
