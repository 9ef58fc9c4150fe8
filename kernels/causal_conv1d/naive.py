"""Causal depthwise convolution, as defined: each row is split into its documents, F.conv1d runs on each.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_naive(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, activation: str = "silu"
) -> Tensor:
    """Run F.conv1d on each document of each row, in the dtype of x."""
    W, rows = weight.shape[1], []
    for row, ids in zip(x, doc_ids):
        lengths = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        parts = [F.pad(document.T, (W - 1, 0)) for document in row.split(lengths)]
        rows.append(torch.cat([F.conv1d(p, weight.unsqueeze(1), bias, groups=len(bias)) for p in parts], 1).T)
    pre = torch.stack(rows)
    return F.silu(pre) if activation == "silu" else pre
