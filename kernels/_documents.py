"""The mask of packed documents, as defined: for the definitions of several ops.

B batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen_by(doc_ids: Tensor, window: int = 0, causal: bool = True) -> Tensor:
    """Return which query sees which key (B,T,T), cell by cell."""
    T, ids = doc_ids.shape[1], doc_ids.tolist()
    cells = [
        [
            [row[i] == row[j] and (j <= i or not causal) and (i - j < window or not window) for j in range(T)]
            for i in range(T)
        ]
        for row in ids
    ]
    return torch.tensor(cells, device=doc_ids.device)
