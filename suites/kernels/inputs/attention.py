"""Inputs of the attention suites.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first: the op folds the
heads into one product and rebuilds its softmax from the logsumexp.
"""

from __future__ import annotations

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
