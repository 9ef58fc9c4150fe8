"""Inputs of the moe_dispatch suites.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

E = 5


def make_inputs(B=2, T=17, K=3, D=4, dtype=torch.float32, device="cpu", seed=0) -> tuple[Tensor, Tensor]:
    """Return random x (B,T,D), and K distinct experts per token, skewed to low ids so that buckets fill unevenly."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=g, dtype=torch.float64).to(device, dtype)
    scores = torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)
    return x, scores.topk(K, -1).indices.to(device)
