"""Inputs of the interpreted dsa_indexer kernels.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dsa_indexer.eager import dsa_choice

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
CASES = {"plain": (0.25, 0.0), "softcap": (0.25, 2.0), "saturated": (3.0, 5.0), "wide softcap": (0.25, 100.0)}
Inputs = tuple[Tensor, ...]


def documents(B: int, T: int) -> Tensor:
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids


def make_index_inputs(B: int, T: int, J: int, P: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return q, k, weights of either sign, doc_ids."""
    g = torch.Generator().manual_seed(T)
    shapes = (B, T, J, P), (B, T, P), (B, T, J)
    return *(torch.randn(*s, generator=g).to(dtype) for s in shapes), documents(B, T)


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return q, k, v, a random choice of earlier keys of the same document in random order, and dout."""
    B, T, Hq, Hkv, P, K = sizes
    g = torch.Generator().manual_seed(T)
    q, k, v, dout = (
        torch.randn(B, T, H, P, generator=g, dtype=torch.float64).to(dtype) for H in (Hq, Hkv, Hkv, Hq)
    )
    doc_ids = documents(B, T)
    unseen = (doc_ids.unsqueeze(2) != doc_ids.unsqueeze(1)) | torch.ones(T, T, dtype=torch.bool).triu(1)
    chosen = dsa_choice(torch.rand(B, T, T, generator=g).masked_fill(unseen, float("-inf")), K)
    return q, k, v, chosen[..., torch.randperm(K, generator=g)].contiguous(), dout
