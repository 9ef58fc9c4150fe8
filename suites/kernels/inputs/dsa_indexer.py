"""Inputs of the dsa_indexer suites.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
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
