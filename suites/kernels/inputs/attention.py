"""Inputs and plain formulas of the attention suites.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
The plain formula repeats K and V, builds its mask cell by cell and takes torch.softmax; the op folds the
heads into one product and rebuilds its softmax from the logsumexp. The oracle is the reference in fp64, which
must agree with the plain formula in fp64 first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and documents: three of them in row 0 (ids 5, 1, 3), two in the others, then padding."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)


def plain_attention(
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
