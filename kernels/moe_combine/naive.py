"""Weighted sum of the experts' outputs, as defined: one of a token's K assignments after the other.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_combine_naive(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, total: torch.dtype | None = None
) -> Tensor:
    """Compute the plain formula: products in the dtype of y, each addition rounds to `total` (y.dtype if None)."""
    B, T, K = expert.shape
    first = torch.arange(B, device=y.device).unsqueeze(1) * bucket
    out = y.new_zeros((B, T, y.shape[2]), dtype=total)
    for k in range(K):
        rows = y[expert[..., k], first + slot[..., k].clamp(min=0)]
        rows = torch.where(slot[..., k, None] < 0, 0, rows)
        out = out + (weights[..., k, None].to(y.dtype) * rows).to(out.dtype)
    return out
