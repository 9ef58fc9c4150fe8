"""Gated RMS norm, in plain torch, with its gradient.

    y = RMS(x silu(gate)) weight                  (norm after the gate, the default)
    y = RMS(x) weight silu(gate)                  (norm_before_gate)
    RMS(u) = u / sqrt(mean(u^2) + eps), the mean over each group of channels

D channels, S group size (G = D / S groups).
Sources: Mamba-2's gated norm (Dao & Gu 2024), RMS norm (Zhang & Sennrich 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _group_mean(u: Tensor, S: int) -> Tensor:
    """Mean over each group of S channels, broadcast to every channel of the group: (..., D)."""
    return u.unflatten(-1, (-1, S)).mean(-1).repeat_interleave(S, dim=-1)


def rms_norm_gated_eager(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:  # fmt: skip
    """x and gate (..., D), weight (D,) -> (..., D) in x.dtype; fp32 (fp64 for fp64 x) inside."""
    acc = torch.promote_types(x.dtype, torch.float32)
    S = x.shape[-1] if group_size is None else group_size
    wide, silu_gate, weight = x.to(acc), F.silu(gate.to(acc)), weight.to(acc)
    u = wide if norm_before_gate else wide * silu_gate
    y = u * torch.rsqrt(_group_mean(u.square(), S) + eps) * weight
    return (y * silu_gate if norm_before_gate else y).to(x.dtype)


def rms_norm_gated_backward_eager(
    x: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, gate, weight) from dy (..., D). The norm is recomputed, not saved.

    With n = r u and r = 1/sqrt(mean u^2 + eps): du = r (dn - n mean(n dn)).
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    wide, z, weight_acc, dy = (t.to(acc) for t in (x, gate, weight, dy))
    sigmoid_gate = torch.sigmoid(z)
    silu_gate, dsilu = (
        z * sigmoid_gate,
        sigmoid_gate * (1 + z * (1 - sigmoid_gate)),
    )  # silu and its derivative
    u = wide if norm_before_gate else wide * silu_gate
    r = torch.rsqrt(_group_mean(u.square(), group_size) + eps)
    n = u * r
    dscaled = dy * silu_gate if norm_before_gate else dy  # gradient of n * weight
    dn = dscaled * weight_acc
    du = r * (dn - n * _group_mean(n * dn, group_size))
    dx = du if norm_before_gate else du * silu_gate
    dsilu_gate = dy * n * weight_acc if norm_before_gate else du * wide
    dweight = (dscaled * n).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), (dsilu_gate * dsilu).to(gate.dtype), dweight.to(weight.dtype)
