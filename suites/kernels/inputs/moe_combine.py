"""Inputs of the moe_combine suites.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_dispatch import moe_dispatch

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]


def make_inputs(
    B=2, T=24, K=3, D=8, E=6, C=8, dtype=torch.float64, device="cpu", seed=0, weights_dtype=None
) -> Inputs:
    """Return y (E,B*C,D) with noise in unused rows too, expert, slot, weights and bucket; a small C drops some."""
    g = torch.Generator().manual_seed(seed)
    scores, expert = torch.rand(B, T, E, generator=g).sub(0.1 * torch.arange(E)).topk(K, -1)
    weights = torch.softmax(scores.double(), -1).to(
        weights_dtype or torch.promote_types(dtype, torch.float32)
    )
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    _, slot, _ = moe_dispatch(torch.zeros(B, T, 1), expert, E, C)
    return *(t.to(device) for t in (y, expert, slot, weights)), C
