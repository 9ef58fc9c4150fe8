"""Sparse attention and its indexer's scores, as defined: dense, under a mask of the chosen keys.

Nothing is gathered before the products or scattered. B batch, T tokens, J index heads, K chosen keys per query,
Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dsa_attention_naive(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale=None, softcap=0.0) -> Tensor:
    """Compute dense attention in its inputs' dtype except for the softmax, under a mask made from the indices."""
    B, T, Hq, P = q.shape
    R = Hq // k.shape[2]
    seen = torch.zeros(B, T, T + 1, dtype=torch.bool, device=q.device)
    seen = seen.scatter(2, torch.where(indices < 0, T, indices).long(), True)[:, None, :, :T]
    key, value = (t.repeat_interleave(R, 2).transpose(1, 2) for t in (k, v))
    s = q.transpose(1, 2) @ key.mT * (P**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, -torch.inf)
    p = torch.softmax(s, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p @ value).transpose(1, 2)


def dsa_chosen_scores_naive(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Score every key in the inputs' dtype, and gather the chosen ones."""
    dots = torch.relu(q.transpose(1, 2) @ k.mT.unsqueeze(1))
    scores = (weights.mT.unsqueeze(-1) * dots).sum(1)
    chosen = scores.gather(2, indices.long().clamp(min=0)).masked_fill(indices < 0, 0)
    return chosen.to(torch.promote_types(q.dtype, torch.float32))


def dsa_distribution_naive(q: Tensor, k: Tensor, indices: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute dense attention weights in the inputs' dtype (softmax in fp32), and gather the chosen keys' weights."""
    key = k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    s = q.transpose(1, 2) @ key.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = indices.long().clamp(min=0).unsqueeze(1).expand(-1, q.shape[2], -1, -1)
    s = s.gather(3, at).masked_fill((indices < 0).unsqueeze(1), -torch.inf)
    return torch.softmax(s, -1, dtype=torch.promote_types(q.dtype, torch.float32)).nan_to_num(0).mean(1)
