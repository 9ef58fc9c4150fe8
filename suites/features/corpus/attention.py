"""Attention: flex_attention, its block masks, and the fused attention pattern."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from suites.features.corpus.case import differences, regression

# B batch, H heads, T tokens, P head dim.
B, H, T, P = 1, 4, 13, 16


@regression(
    "attention-mask_of_a_derived_position",
    "A block mask that closes over position + 1 cannot be built inside a compiled decode step",
    issue=182606,
    bad="2.8.0 2.9.0",
    good="2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0",
    error="id() with unsupported args",
)
def mask_of_a_derived_position() -> list[str]:
    def step(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        end = position + 1

        def visible(b, h, i, j):
            return (j >= 0) & (j <= end)

        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    q, k, v = torch.randn(B, H, 1, P), torch.randn(B, H, T, P), torch.randn(B, H, T, P)
    return [
        line
        for position in (5, 7)
        for line in differences("output", step(q, k, v, position), compiled(q, k, v, position))
    ]
