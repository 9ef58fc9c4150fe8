"""Inputs and plain formulas of the dsa_indexer suites.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
The plain attention is dense, with a mask of the chosen keys: nothing is gathered or scattered. The oracle is the
reference in fp64, which must agree with it in fp64 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dsa_indexer import dsa_indexer


def documents(B: int, T: int, device: str) -> Tensor:
    """Return three documents in row 0 (ids 5, 1, 3), two in the others, then padding."""
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids.to(device)


def make_index_inputs(
    B=2, T=33, J=3, width=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, weights of either sign, and documents."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T, J, width), (B, T, width), (B, T, J)
    tensors = (torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return *tensors, documents(B, T, device)


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, K=7, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and the indexer's choice of K keys, so that early queries of a document have fewer."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    indices = dsa_indexer(*make_index_inputs(B=B, T=T, seed=seed), top_k=K).to(device)
    return *(t.to(device, dtype) for t in tensors), indices


def plain_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale=None, softcap=0.0) -> Tensor:
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
