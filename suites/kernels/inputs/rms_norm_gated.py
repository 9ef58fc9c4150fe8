"""Inputs of the rms_norm_gated suites.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(shape=(2, 9), D=64, dtype=torch.float64, device="cpu", seed=0) -> Inputs:
    """Return random x and gate (..., D) and a weight near 1."""
    g = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(*shape, D, generator=g, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)
    return tuple(t.to(device, dtype) for t in (x, gate, weight))
