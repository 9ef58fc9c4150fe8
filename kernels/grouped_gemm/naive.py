"""Grouped matrix product, as defined: one torch.mm per expert.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_gemm_naive(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute one torch.mm per expert, in the dtype of x."""
    y, start = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for w, count in zip(weight, counts.tolist()):
        y[start : start + count] = torch.mm(x[start : start + count], w)
        start += count
    return y
