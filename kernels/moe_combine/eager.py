"""Weighted sum of the experts' outputs back into tokens, in plain torch, with its gradient.

    out[b,t] = sum_k weights[b,t,k] y[expert, b*C + slot],   dropped assignments (slot -1) add nothing

Product and sum are fp32 for any dtype of the experts, and the weights must be fp32: if experts cancel,
bf16 weights are as wrong as a bf16 sum. The accumulator is an explicit fp32 tensor, visible in a traced graph:
index_add over bf16 on the CPU accumulates wider internally, so values alone would not reveal a bf16 accumulator.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
Source: the combine of GShard (Lepikhin et al. 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _accumulator(y: Tensor, weights: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(y.dtype, weights.dtype), torch.float32)


def _rows(expert: Tensor, slot: Tensor, C: int) -> Tensor:
    """The row of the flattened (E*B*C, D) outputs of each assignment, (B*T*K,); dropped: slot 0's."""
    B = expert.shape[0]
    sequence = torch.arange(B, device=expert.device).view(-1, 1, 1)
    return ((expert.clamp(min=0) * B + sequence) * C + slot.clamp(min=0)).flatten()


def _tokens(expert: Tensor) -> Tensor:
    """The token b*T + t of each assignment, (B*T*K,)."""
    B, T, K = expert.shape
    return torch.arange(B * T, device=expert.device).unsqueeze(1).expand(B * T, K).reshape(-1)


def moe_combine_eager(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """y (E, B*C, D), expert and slot (B,T,K) int64, weights (B,T,K) fp32 -> (B,T,D) in out_dtype.

    out_dtype None is y.dtype.
    Dropped products are masked by a select, not multiplied by 0: the row read in their place may contain inf.
    """
    acc = _accumulator(y, weights)
    B, T, _ = expert.shape
    D = y.shape[2]
    outputs = y.flatten(0, 1).index_select(0, _rows(expert, slot, bucket)).to(acc)  # (B*T*K,D)
    products = (outputs * weights.to(acc).reshape(-1, 1)).where(slot.reshape(-1, 1) >= 0, 0)
    total = y.new_zeros((B * T, D), dtype=acc).index_add(0, _tokens(expert), products)
    return total.view(B, T, D).to(y.dtype if out_dtype is None else out_dtype)


def moe_combine_backward_eager(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y (E, B*C, D) in y.dtype and of weights (B,T,K) in weights.dtype, from dout (B,T,D)."""
    acc = _accumulator(y, weights)
    rows, kept = _rows(expert, slot, bucket), slot.reshape(-1, 1) >= 0
    dtoken = dout.to(acc).flatten(0, 1).index_select(0, _tokens(expert))  # (B*T*K,D)
    outputs = y.flatten(0, 1).index_select(0, rows).to(acc)
    dweights = (dtoken * outputs).where(kept, 0).sum(1)
    products = (dtoken * weights.to(acc).reshape(-1, 1)).where(kept, 0)
    dy = torch.zeros_like(y.flatten(0, 1), dtype=acc).index_add(0, rows, products)
    return dy.view_as(y).to(y.dtype), dweights.view_as(weights).to(weights.dtype)
