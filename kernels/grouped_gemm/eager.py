"""Grouped matrix product, in plain torch, with its gradient: the rows of each expert times the expert's matrix.

    y_m = x_m weight_e   for the counts_e rows m of expert e, which follow the rows of expert e - 1

Rows beyond the sum of the counts belong to no expert: they are never read, and their results are zero. The
counts are read on the host, for the loop over the experts.

M rows, E experts, D_in and D_out model dims on both sides.
Source: MegaBlocks (Gale et al. 2022), for groups of uneven size without padding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _split(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Rows of each expert in the accumulation dtype, then the rows without expert."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sizes = counts.tolist()
    return wide.split([*sizes, rows.shape[0] - sum(sizes)])


def grouped_gemm_eager(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x (M,D_in), weight (E,D_in,D_out), counts (E,) -> (M,D_out) in x.dtype, summed in fp32 (fp64 for fp64)."""
    *groups, rest = _split(x, counts)
    products = [group @ w.to(group.dtype) for group, w in zip(groups, weight)]
    return torch.cat([*products, rest.new_zeros(rest.shape[0], weight.shape[2])]).to(x.dtype)


def grouped_gemm_backward_eager(
    x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of (x, weight) from dy (M,D_out). An expert without rows gets zeros."""
    *groups, rest = _split(x, counts)
    *dgroups, _ = _split(dy, counts)
    dx = torch.cat([*(d @ w.to(d.dtype).mT for d, w in zip(dgroups, weight)), torch.zeros_like(rest)])
    dweight = torch.stack([group.mT @ d for group, d in zip(groups, dgroups)])
    return dx.to(x.dtype), dweight.to(weight.dtype)
