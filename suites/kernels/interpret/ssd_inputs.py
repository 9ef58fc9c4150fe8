"""Inputs of the interpreted ssd_chunk_scan kernels.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from suites.support.scans import documents

Tensors = tuple[Tensor, ...]


def make_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, starts: tuple[int, ...] = (5, 6, 27), seed: int = 0
) -> Tensors:
    """Return the op's inputs without chunk_size, then dy and dfinal; x, B and C are slices of one row."""
    B, T, H, P, N, G, _ = sizes
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, to: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    x, Bmat, Cmat = draw(B, T, H * P + 2 * G * N, to=dtype).split([H * P, G * N, G * N], -1)
    A = -torch.rand(H, generator=g) - 0.05
    return (
        x.unflatten(-1, (H, P)), F.softplus(draw(B, T, H)), A, Bmat.unflatten(-1, (G, N)), Cmat.unflatten(-1, (G, N)),
        draw(H, to=dtype), documents(B, T, starts), draw(B, H, P, N), draw(B, T, H, P, to=dtype), draw(B, H, P, N),
    )  # fmt: skip
