"""Cross entropy of softcapped logits, token by token, in plain torch, with its gradient.

    s = c tanh(logits / c)  (softcap c > 0; s = logits without),   loss = log sum_v exp(s_v) - s_target

An ignored token is treated as if its logits were zeros: its loss and gradient are zero for any logits.

V vocabulary.
Sources: softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _capped(logits: Tensor, kept: Tensor, softcap: float) -> Tensor:
    """s (..., V) in fp32 (fp64 for fp64), zeros where the token is not kept.

    Uses a select, not a product with 0: an ignored token may contain inf or nan.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).where(kept.unsqueeze(-1), 0)
    return softcap * torch.tanh(wide / softcap) if softcap > 0 else wide


def cross_entropy_with_sums(
    logits: Tensor, target: Tensor, softcap: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, shift, total: each (...) in fp32 (fp64 for fp64), with total = sum_v exp(s_v - shift).

    shift and log(total) are returned separately: their sum, the logsumexp, loses digits if shift is large.
    """
    kept = target != ignore_index
    s = _capped(logits, kept, softcap)
    shift = s.amax(-1)
    total = torch.exp(s - shift.unsqueeze(-1)).sum(-1)
    picked = s.gather(-1, target.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    return ((shift - picked) + total.log()).where(kept, 0), shift, total


def cross_entropy_eager(
    logits: Tensor, target: Tensor, softcap: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """logits (..., V), target (...) int64 -> loss (...) in fp32 (fp64 for fp64 logits), 0 where ignored."""
    return cross_entropy_with_sums(logits, target, softcap, ignore_index)[0]


def cross_entropy_backward_eager(
    logits: Tensor, target: Tensor, shift: Tensor, total: Tensor, dloss: Tensor, softcap: float,
    ignore_index: int,
) -> Tensor:  # fmt: skip
    """Gradient of the logits (..., V) from dloss (...) and the sums of the forward. Recomputes the softmax.

    dlogits = dloss (softmax(s) - onehot) (1 - (s/c)^2)
    """
    kept = target != ignore_index
    s = _capped(logits, kept, softcap)
    p = torch.exp(s - shift.unsqueeze(-1)) / total.unsqueeze(-1)
    at = target.where(kept, 0).unsqueeze(-1)
    ds = p.scatter(-1, at, p.gather(-1, at) - 1) * dloss.to(s.dtype).unsqueeze(-1)
    if softcap > 0:
        ds = ds * (1 - (s / softcap).square())
    return ds.where(kept.unsqueeze(-1), 0).to(logits.dtype)
