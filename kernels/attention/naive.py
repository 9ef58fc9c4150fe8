"""Attention over packed documents, as defined: K and V repeated, a mask cell by cell, torch.softmax.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels._documents import seen_by


def attention_naive(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale=None, softcap=0.0, window=0, causal=True
) -> Tensor:
    """Compute the formula directly: in its inputs' dtype except for the softmax, with K and V repeated."""
    R, P = q.shape[2] // k.shape[2], q.shape[3]
    seen = seen_by(doc_ids, window, causal)
    q, k, v = (
        q.transpose(1, 2),
        k.repeat_interleave(R, 2).transpose(1, 2),
        v.repeat_interleave(R, 2).transpose(1, 2),
    )
    s = (q @ k.mT) * (1 / math.sqrt(P) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen.unsqueeze(1), -torch.inf)
    p = torch.softmax(s, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p @ v).transpose(1, 2)
