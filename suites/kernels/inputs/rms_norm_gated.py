"""Inputs and plain formulas of the rms_norm_gated suites.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(shape=(2, 9), D=64, dtype=torch.float64, device="cpu", seed=0) -> Inputs:
    """Return random x and gate (..., D) and a weight near 1."""
    g = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(*shape, D, generator=g, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)
    return tuple(t.to(device, dtype) for t in (x, gate, weight))


def plain_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps=1e-5, group_size=None, norm_before_gate=False
) -> Tensor:
    """Apply F.rms_norm to each group, every operation in the dtype of x."""
    S = group_size or x.shape[-1]
    u = x if norm_before_gate else x * F.silu(gate)
    n = torch.cat([F.rms_norm(part, (S,), eps=eps) for part in u.split(S, -1)], -1) * weight
    return n * F.silu(gate) if norm_before_gate else n
