"""Gated RMS norm, as defined: F.rms_norm of each group of channels.

D channels, S group size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_gated_naive(
    x: Tensor, gate: Tensor, weight: Tensor, eps=1e-5, group_size=None, norm_before_gate=False
) -> Tensor:
    """Apply F.rms_norm to each group, every operation in the dtype of x."""
    S = group_size or x.shape[-1]
    u = x if norm_before_gate else x * F.silu(gate)
    n = torch.cat([F.rms_norm(part, (S,), eps=eps) for part in u.split(S, -1)], -1) * weight
    return n * F.silu(gate) if norm_before_gate else n
