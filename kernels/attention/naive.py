"""Attention over packed documents, as defined: K and V repeated, a mask cell by cell, torch.softmax.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_naive(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale=None, softcap=0.0, window=0, causal=True
) -> Tensor:
    """Compute the formula directly: in its inputs' dtype except for the softmax, with K and V repeated."""
    B, T, Hq, P = q.shape
    R, ids = Hq // k.shape[2], doc_ids.tolist()
    seen = torch.tensor(
        [
            [
                [
                    ids[b][i] == ids[b][j] and (j <= i or not causal) and (i - j < window or not window)
                    for j in range(T)
                ]
                for i in range(T)
            ]
            for b in range(B)
        ]
    )
    q, k, v = (
        q.transpose(1, 2),
        k.repeat_interleave(R, 2).transpose(1, 2),
        v.repeat_interleave(R, 2).transpose(1, 2),
    )
    s = (q @ k.mT) * (1 / math.sqrt(P) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen.to(q.device).unsqueeze(1), -torch.inf)
    p = torch.softmax(s, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p @ v).transpose(1, 2)
