"""Causal depthwise convolution over tokens with document boundaries, in plain torch, with its gradient.

    pre_t = bias + sum_j weight[:, W-1-j] x_{t-j} [doc_{t-j} = doc_t],   y = silu(pre)

The last column of the weight multiplies the current token, as torch.nn.functional.conv1d does under left
padding.

B batch, T tokens, D channels, W conv width, j lag in 0..W-1.
Source: the short convolution of Mamba (Gu & Dao 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "none")


def _delayed(x: Tensor, doc_ids: Tensor, W: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each lag j: j, x delayed by j tokens and zero across document starts, the kept mask (B,T,1).

    Uses a select, not a product with 0: the previous document may contain inf or nan.
    """
    T = x.shape[1]
    for j in range(W):
        kept = (F.pad(doc_ids, (j, 0))[:, :T] == doc_ids).unsqueeze(-1)
        yield j, F.pad(x, (0, 0, j, 0))[:, :T].where(kept, 0), kept


def _preactivation(x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor) -> Tensor:
    W, pre = weight.shape[1], bias
    for j, tap, _ in _delayed(x, doc_ids, W):
        pre = pre + weight[:, W - 1 - j] * tap
    return pre


def causal_conv1d_eager(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, activation: str = "silu"
) -> Tensor:
    """x (B,T,D), weight (D,W), bias (D,), doc_ids (B,T) int32 -> (B,T,D) in x.dtype.

    Sum and activation are fp32 (fp64 for fp64 x); one cast at the end.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    pre = _preactivation(x.to(acc), weight.to(acc), bias.to(acc), doc_ids)
    return (F.silu(pre) if activation == "silu" else pre).to(x.dtype)


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Decode one token: x (B,D), state (B,W-1,D) the previous inputs, oldest first.

    weight (D,W), bias (D,) -> y (B,D) in x.dtype, new state (B,W-1,D) in state.dtype. The caller zeroes the
    state where a new document begins.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    taps = torch.cat((state, x.unsqueeze(1).to(state.dtype)), dim=1)
    pre = bias.to(acc) + (taps.to(acc) * weight.mT.to(acc)).sum(1)
    return (F.silu(pre) if activation == "silu" else pre).to(x.dtype), taps[:, 1:]


def causal_conv1d_backward_eager(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, dy: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias) from dy (B,T,D). The preactivation is recomputed, not saved."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide, weight_acc, dpre = x.to(acc), weight.to(acc), dy.to(acc)
    T, W = x.shape[1], weight.shape[1]
    if activation == "silu":
        pre = _preactivation(wide, weight_acc, bias.to(acc), doc_ids)
        gate = torch.sigmoid(pre)
        dpre = dpre * gate * (1 + pre * (1 - gate))
    dx, columns = torch.zeros_like(wide), []
    for j, tap, kept in _delayed(wide, doc_ids, W):
        columns.append((dpre * tap).sum((0, 1)))
        sent_back = (weight_acc[:, W - 1 - j] * dpre).where(kept, 0)
        dx = dx + F.pad(sent_back, (0, 0, 0, j))[:, j : j + T]
    dweight = torch.stack(columns[::-1], dim=1)
    return dx.to(x.dtype), dweight.to(weight.dtype), dpre.sum((0, 1)).to(bias.dtype)
