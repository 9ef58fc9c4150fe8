"""Inputs of the mla suites.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("q_nope", "q_rope", "c_kv", "k_rope", "W_uk", "W_uv", "doc_ids")


def make_inputs(
    B=2, T=33, H=3, C=16, P=16, R=8, Pv=32, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, ...]:
    """Return random inputs in the order of NAMES; three documents in row 0 (ids 5, 1, 3), two in the others,
    padding.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = (
        draw(B, T, H, P), draw(B, T, H, R), draw(B, T, C), draw(B, T, R),
        draw(H, P, C) * C**-0.5, draw(H, Pv, C) * C**-0.5,
    )  # fmt: skip
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)
