"""Inputs of the grouped_gemm suites.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COUNTS = (5, 0, 17, 8)


def make_inputs(
    counts: Sequence[int] = COUNTS, D_in=8, D_out=16, spare=3, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x with `spare` unassigned rows at the end, weight, and the counts as int64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts) + spare, D_in, generator=g, dtype=torch.float64)
    weight = torch.randn(len(counts), D_in, D_out, generator=g, dtype=torch.float64)
    return x.to(device, dtype), weight.to(device, dtype), torch.tensor(counts, device=device)
