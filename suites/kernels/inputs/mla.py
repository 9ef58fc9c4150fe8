"""Inputs and plain formulas of the mla suites.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The plain formula loops over the heads with an explicit mask; the oracle is the reference in fp64, which must agree with
the plain formula in fp64 first.
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


def seen_by(doc_ids: Tensor, causal: bool = True) -> Tensor:
    """Return the mask (B,T,T) bool, computed cell by cell."""
    T, ids = doc_ids.shape[1], doc_ids.tolist()
    cells = [
        [[row[i] == row[j] and (j <= i or not causal) for j in range(T)] for i in range(T)] for row in ids
    ]
    return torch.tensor(cells, device=doc_ids.device)


def plain_mla(
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, scale=None, softcap=0.0, causal=True
) -> Tensor:
    """Compute the formula directly: in its inputs' dtype except for the softmax, one head after the other."""
    scale = (q_nope.shape[3] + q_rope.shape[3]) ** -0.5 if scale is None else scale
    seen = seen_by(doc_ids, causal)
    heads = []
    for h in range(q_nope.shape[2]):
        key, value = c_kv @ W_uk[h].T, c_kv @ W_uv[h].T
        s = (q_nope[:, :, h] @ key.mT + q_rope[:, :, h] @ k_rope.mT) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~seen, -torch.inf)
        p = torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32)).to(s.dtype)
        heads.append(p @ value)
    return torch.stack(heads, 2)
