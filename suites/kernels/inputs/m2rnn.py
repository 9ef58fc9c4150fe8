"""Inputs of the m2rnn suites.

B batch, T tokens, H heads, K key dim, V value dim.
The oracle is the recurrence in fp64, one step per token, differentiated by autograd. The op's forward is the same loop
with everything except the recurrence computed outside of it; its backward is derived by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from suites.support.comparison import Named
from suites.support.scans import documents

NAMES = ("q", "k", "v", "W", "f", "doc_ids", "h0")
PER_TOKEN = ("q", "k", "v", "f", "doc_ids")
FLOATS = tuple(n for n in NAMES if n != "doc_ids")


def make_inputs(
    B=2, T=30, H=3, K=6, V=4, dtype=torch.float64, device="cpu", seed=0, starts=(9, 10, 22)
) -> Named:
    """Return random inputs, W of spectral norm 1; a document begins at each of `starts`, three tokens later per row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    W = draw(H, V, V)
    inputs = {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, H, V),
        "W": W / torch.linalg.matrix_norm(W, 2)[:, None, None],
        "f": draw(B, T, H).sigmoid(),
        "doc_ids": documents(B, T, starts),
        "h0": draw(B, H, K, V),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in ("q", "k", "v") else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}
