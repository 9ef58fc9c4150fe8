"""Inputs of the causal_conv1d suites.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = (9, 1, 2, 13, 5)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(B=2, D=8, W=4, lengths=LENGTHS, dtype=torch.float64, device="cpu", seed=0) -> Inputs:
    """Return random x, weight, bias and documents of these lengths in row 0, rotated by one token per further row; the
    last is padding (-1).
    """
    g = torch.Generator().manual_seed(seed)
    names = [*range(3, 2 + len(lengths)), -1]
    ids = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in zip(names, lengths)])
    doc_ids = torch.stack([ids.roll(row) for row in range(B)])
    shapes = ((B, len(ids), D), (D, W), (D,))
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)
