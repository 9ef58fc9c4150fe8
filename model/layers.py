"""Layers shared by all blocks: weightless RMS norm, bias-free projection, fp32-or-wider casts.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm without weight over the last dim; x (..., D), same dtype out. Source: Zhang & Sennrich 2019."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def projection(d_in: int, d_out: int, depth: int = 0) -> nn.Linear:
    """Create a bias-free linear map (D_in -> D_out), normal init; for a residual output, `depth` reduces its scale.

    The residual scale 1/sqrt(2 depth) keeps the stream's variance constant over depth (GPT-2).
    """
    linear = nn.Linear(d_in, d_out, bias=False)
    std = d_in**-0.5 * ((2 * depth) ** -0.5 if depth else 1.0)
    nn.init.normal_(linear.weight, std=std)
    return linear


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (...,D) by weight (M,D) in fp32 or wider, also under autocast -> (...,M).

    The context is entered only if autocast is on: AOTAutograd does not cache a graph that enters one (torch 2.13).
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(widen(x), widen(weight))
    return F.linear(widen(x), widen(weight))


def widen(x: Tensor) -> Tensor:
    """Cast x to fp32, or return it if it is wider already (fp64 for the oracle)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
