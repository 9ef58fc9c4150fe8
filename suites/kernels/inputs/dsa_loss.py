"""Inputs of the dsa_loss suites.

B batch, T tokens, J index heads, K chosen keys per query. The oracle is the reference in fp64, which must agree with
the plain scores (naive.py) in fp64 first.
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
