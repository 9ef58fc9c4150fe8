"""Sparse attention over keys selected by a small indexer, in plain torch, with the attention's gradient.

    I[t,s] = sum_h w[t,h] relu(q_h[t].k[s])      the index score, over earlier tokens s <= t of t's document
    S[t]   = the K keys of the highest I[t,s], the earlier one of ties
    out[t] = sum over s in S[t] of softmax(scale q[t].k[s], softcapped) v[s]

The selection has no gradient. The indexer is trained by its own loss, KL(mean over heads of p || softmax of I), over
the chosen keys.

B batch, T tokens, J index heads, P head dim (of the indexer or of the attention), K chosen keys per query,
Hq and Hkv heads, R = Hq / Hkv.
Sources: DeepSeek-V3.2-Exp (2025), section 2; softcap (Gemma 2, 2024); gradient from the saved logsumexp
(FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the accumulation dtype: fp32, or fp64 for fp64."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def dsa_scores(q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor) -> Tensor:
    """q (B,T,J,P), k (B,T,P), weights (B,T,J), doc_ids (B,T) -> I (B,T,T) in fp32 (fp64 for fp64), -inf where the
    query (second axis) may not attend to the key. Heads are summed one by one, so nothing has size J*T*T."""
    q, k, weights = _wide(q, k, weights)
    scores = sum(weights[:, :, h, None] * F.relu(q[:, :, h] @ k.mT) for h in range(q.shape[2]))
    seen = (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)).tril()
    return scores.masked_fill(~seen, float("-inf"))


def dsa_choice(scores: Tensor, top_k: int) -> Tensor:
    """scores (B,T,T), -inf where there is no key -> the K best keys of each query, (B,T,K) int32.

    Ascending, padded with -1 if there are fewer than K. A stable sort breaks ties by the earlier key, which
    torch.topk does not guarantee.
    """
    T = scores.shape[-1]
    best, order = (t[..., :top_k] for t in torch.sort(scores, dim=-1, descending=True, stable=True))
    keys = order.masked_fill(best == float("-inf"), T).sort(-1).values
    keys = F.pad(keys, (0, max(top_k - T, 0)), value=T)
    return keys.masked_fill(keys == T, -1).to(torch.int32)


def dsa_indexer_eager(q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor, top_k: int) -> Tensor:
    """Arguments of `dsa_scores` -> the chosen keys (B,T,K) int32 as `dsa_choice` orders them."""
    return dsa_choice(dsa_scores(q, k, weights, doc_ids), top_k)


def _chosen(x: Tensor, indices: Tensor) -> Tensor:
    """x (B,T,H,P), indices (B,T,K) -> each query's rows of x (B,T,H,K,P) in fp32/fp64; 0 for an index -1."""
    B, T = indices.shape[:2]
    row = indices.long().clamp(min=0) + torch.arange(B, device=x.device).view(B, 1, 1) * T
    rows = _wide(x)[0].flatten(0, 1)[row].masked_fill((indices < 0)[..., None, None], 0)
    return rows.transpose(2, 3)


def _scattered(x: Tensor, indices: Tensor) -> Tensor:
    """Transpose of `_chosen`: x (B,T,H,K,P), zero where the index is -1 -> sums per key (B,T,H,P)."""
    B, T, H, _, P = x.shape
    row = indices.long().clamp(min=0) + torch.arange(B, device=x.device).view(B, 1, 1) * T
    sums = x.new_zeros(B * T, H, P)
    return sums.index_add(0, row.flatten(), x.transpose(2, 3).reshape(-1, H, P)).view(B, T, H, P)


def _logits(q: Tensor, k: Tensor, indices: Tensor, scale: float, softcap: float) -> Tensor:
    """Scaled, then capped logits (B,T,Hkv,R,K) of the chosen keys, -inf for an index -1."""
    query = _wide(q)[0].unflatten(2, (k.shape[2], -1))
    s = query @ _chosen(k, indices).mT * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    return s.masked_fill((indices < 0)[:, :, None, None], float("-inf"))


def _lse(s: Tensor) -> Tensor:
    """Logsumexp over the chosen keys; 0 for a query without keys, so that its weights exp(s - lse) are 0, not nan."""
    lse = torch.logsumexp(s, -1)
    return lse.masked_fill(lse == float("-inf"), 0)


def dsa_attention_forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return out (B,T,Hq,P) in q.dtype and the logsumexp (B,Hq,T) of the chosen logits, fp32 (fp64 for fp64)."""
    s = _logits(q, k, indices, scale, softcap)
    lse = _lse(s)
    out = torch.exp(s - lse.unsqueeze(-1)) @ _chosen(v, indices)
    return out.flatten(2, 3).to(q.dtype), lse.flatten(2, 3).transpose(1, 2)


def dsa_attention_eager(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float | None = None, softcap: float = 0.0
) -> Tensor:
    """q (B,T,Hq,P), k and v (B,T,Hkv,P), indices (B,T,K) int32 -> (B,T,Hq,P) in q.dtype; scale None is 1/sqrt(P)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return dsa_attention_forward_with_lse(q, k, v, indices, scale, softcap)[0]


def dsa_attention_backward_eager(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (q, k, v) from dout (B,T,Hq,P) and the forward's out and lse; p is recomputed as exp(s - lse)."""
    Hkv = k.shape[2]
    query, o, do = (t.unflatten(2, (Hkv, -1)) for t in _wide(q, out, dout))
    s = _logits(q, k, indices, scale, softcap)
    p = torch.exp(s - lse.transpose(1, 2).unflatten(2, (Hkv, -1)).unsqueeze(-1))
    ds = p * (do @ _chosen(v, indices).mT - (do * o).sum(-1, keepdim=True)) * scale
    if softcap > 0:
        slope = 1 - (s / softcap).square()
        ds = ds * slope.masked_fill((indices < 0)[:, :, None, None], 0)
    dq = (ds @ _chosen(k, indices)).flatten(2, 3)
    dk, dv = _scattered(ds.mT @ query, indices), _scattered(p.mT @ do, indices)
    return tuple(g.to(q.dtype) for g in (dq, dk, dv))


def dsa_distribution_eager(q: Tensor, k: Tensor, indices: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention weights of the chosen keys, mean over the query heads: (B,T,K) in fp32 (fp64 for fp64), 0 for -1."""
    s = _logits(q, k, indices, scale, softcap)
    return torch.exp(s - _lse(s).unsqueeze(-1)).mean((2, 3))


def dsa_chosen_scores_eager(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """q (B,T,J,P), k (B,T,P), weights (B,T,J), indices (B,T,K) -> I of the chosen keys (B,T,K) in fp32 (fp64 for
    fp64), 0 for an index -1."""
    q, weights = _wide(q, weights)
    return (F.relu(_chosen_keys(k, indices) @ q.mT) @ weights.unsqueeze(-1)).squeeze(-1)


def dsa_chosen_scores_backward_eager(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, weights) from dscores (B,T,K)."""
    query, weight, ds = _wide(q, weights, dscores.unsqueeze(-1))
    key = _chosen_keys(k, indices)
    dots = key @ query.mT  # (B,T,K,J)
    grad = torch.where(dots > 0, ds * weight.unsqueeze(2), 0)
    dk = _scattered((grad @ query).unsqueeze(2), indices).squeeze(2)
    return (grad.mT @ key).to(q.dtype), dk.to(k.dtype), (F.relu(dots) * ds).sum(2).to(weights.dtype)


def _chosen_keys(k: Tensor, indices: Tensor) -> Tensor:
    """k (B,T,P), indices (B,T,K) -> (B,T,K,P) in fp32/fp64; 0 for an index -1."""
    return _chosen(k.unsqueeze(2), indices).squeeze(2)


def dsa_loss_eager(scores: Tensor, indices: Tensor, target: Tensor) -> Tensor:
    """KL(target || softmax over the chosen keys of their scores), mean over the B*T queries.

    scores, target (B,T,K) -> a scalar in fp32 (fp64 for fp64).
    """
    scores, target = _wide(scores, target)
    hidden = indices < 0
    # Finite, so that a query without keys gives no nan in the value or the gradient.
    log_index = scores.masked_fill(hidden, torch.finfo(scores.dtype).min / 2).log_softmax(-1)
    kl = torch.special.xlogy(target, target) - target * log_index
    return kl.masked_fill(hidden, 0).sum(-1).mean()
