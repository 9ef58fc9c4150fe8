"""Inputs and plain formulas of the dsa_loss suites.

B batch, T tokens, J index heads, K chosen keys per query. The plain scores are dense, and gathered by the choice; the
oracle is the reference in fp64, which must agree with them in fp64 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dsa_indexer import dsa_indexer
from suites.kernels.inputs.dsa_indexer import make_index_inputs


def make_score_inputs(
    B=2, T=33, J=3, width=16, K=7, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, weights of either sign, and the choice that they make in fp64."""
    exact = make_index_inputs(B, T, J, width, seed=seed)
    indices = dsa_indexer(*exact, top_k=K).to(device)
    return *(t.to(device, dtype) for t in exact[:3]), indices


def plain_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Score every key in the inputs' dtype, and gather the chosen ones."""
    dots = torch.relu(q.transpose(1, 2) @ k.mT.unsqueeze(1))
    scores = (weights.mT.unsqueeze(-1) * dots).sum(1)
    chosen = scores.gather(2, indices.long().clamp(min=0)).masked_fill(indices < 0, 0)
    return chosen.to(torch.promote_types(q.dtype, torch.float32))
