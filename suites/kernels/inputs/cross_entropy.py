"""Inputs of the cross_entropy suites.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_inputs(
    B=3, T=5, V=37, dtype=torch.float64, device="cpu", seed=0, ignore_index=-100, scale=2.0
) -> tuple[Tensor, Tensor]:
    """Return random logits (B,T,V) and targets (B,T), of which two are ignored in row 0 and one in the last row."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * scale
    target = torch.randint(0, V, (B, T), generator=g)
    target[0, :2] = target[-1, -1] = ignore_index
    return logits.to(device, dtype), target.to(device)
