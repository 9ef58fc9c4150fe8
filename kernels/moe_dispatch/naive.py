"""Padded dispatch of tokens to experts, as defined: one assignment after the other.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_dispatch_naive(
    x: Tensor, expert: Tensor, num_experts: int, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the definition: one assignment after the other, token by token, then k by k."""
    B, T, D = x.shape
    padded = torch.zeros(num_experts, B * bucket, D, dtype=x.dtype, device=x.device)
    slot, overflow = torch.full_like(expert, -1), 0
    for b in range(B):
        taken = [0] * num_experts
        for t in range(T):
            for k, e in enumerate(expert[b, t].tolist()):
                if e < 0:
                    continue
                if taken[e] < bucket:
                    slot[b, t, k] = taken[e]
                    padded[e, b * bucket + taken[e]] = x[b, t]
                    taken[e] += 1
                else:
                    overflow += 1
    return padded, slot, torch.tensor(overflow, device=x.device)
