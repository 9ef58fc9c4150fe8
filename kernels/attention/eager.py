"""Causal attention over packed documents, in plain torch, with its gradient; rope and QK norm before it.

    s = scale q k^T,  s <- c tanh(s / c) if softcap c,  masked to -inf,  p = softmax(s),  out = p v

Head h reads key/value head h // R. The R query heads of one key/value head are folded into rows of one matrix
product, so K and V are never repeated. The product is R*T by S; its result therefore agrees with repeated heads
only up to rounding.

B batch, T query tokens, S key tokens (S = T in training), Hq and Hkv heads, R = Hq / Hkv, P head dim.
Sources: GQA (Ainslie et al. 2023), softcap (Gemma 2, 2024), gradient from the saved logsumexp
(FlashAttention-2, Dao 2023), rotary embedding (Su et al. 2021), QK norm (Henry et al. 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding: rotate dims i and i + P/2 by positions * base^(-2i/P).

    x (B,T,H,P), positions (B,T) integer, counted within the document -> (B,T,H,P) in x.dtype. The angles are
    fp32 (fp64 for fp64 x). Raises ValueError on an odd P.
    """
    P = x.shape[-1]
    if P % 2:
        raise ValueError(f"rope: head dim must be even, not {P}")
    acc = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (-torch.arange(0, P, 2, device=x.device, dtype=acc) / P)
    angle = (positions.to(acc).unsqueeze(-1) * frequency).unsqueeze(2)  # (B,T,1,P/2)
    cos, sin = torch.cos(angle), torch.sin(angle)
    first, second = x.to(acc).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qk_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm without weight over the head dim; x (B,T,H,P), same dtype out, fp32 (fp64 for fp64) inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def attention_mask(doc_ids: Tensor, window: int = 0, causal: bool = True) -> Tensor:
    """Attention mask (B,T,S) bool from doc_ids (B,T): True where the query may attend to the key.

    Same document; j <= i if causal; i - j < window if window > 0. Padding (id -1) is treated as one more document.
    A query always sees itself, so no row is empty.
    """
    T = doc_ids.shape[1]
    index = torch.arange(T, device=doc_ids.device)
    distance = index.unsqueeze(1) - index
    visible = doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)
    if causal:
        visible = visible & (distance >= 0)
    if window > 0:
        visible = visible & (distance < window)
    return visible


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float | None = None, softcap: float = 0.0
) -> Tensor:
    """Decode one query over a cache: q (B,Hq,P), k and v (B,S,Hkv,P), seen (B,S) bool -> (B,Hq,P)."""
    acc = torch.promote_types(q.dtype, torch.float32)
    query, key, value = q.to(acc).unflatten(1, (k.shape[2], -1)), k.to(acc), v.to(acc)  # (B,Hkv,R,P)
    s = torch.einsum("bgrp,bsgp->bgrs", query, key) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    weights = torch.softmax(s.masked_fill(~seen[:, None, None], -torch.inf), -1)
    return torch.einsum("bgrs,bsgp->bgrp", weights, value).flatten(1, 2).to(q.dtype)


def _fold(x: Tensor, Hkv: int) -> Tensor:
    """(B,T,Hq,P) -> (B,Hkv,R*T,P) in the accumulation dtype."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(x: Tensor, T: int) -> Tensor:
    """(B,Hkv,R*T,P) -> (B,T,Hq,P)."""
    return x.unflatten(2, (-1, T)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _logits(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """Folded q (B,Hkv,R*T,P) and k (B,Hkv,S,P) -> scaled, then capped, unmasked logits (B,Hkv,R*T,S)."""
    s = (q @ k.mT) * scale
    return softcap * torch.tanh(s / softcap) if softcap > 0 else s


def _hidden(doc_ids: Tensor, R: int, window: int, causal: bool) -> Tensor:
    """The complement of the mask over folded rows: (B,1,R*T,S)."""
    return ~attention_mask(doc_ids, window, causal).repeat(1, R, 1).unsqueeze(1)


def attention_forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float, softcap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out (B,T,Hq,P) in q.dtype and the logsumexp of the masked logits (B,Hq,T), fp32 (fp64 for fp64)."""
    B, T, Hq, _ = q.shape
    Hkv = k.shape[2]
    query, key, value = (_fold(t, Hkv) for t in (q, k, v))
    hidden = _hidden(doc_ids, Hq // Hkv, window, causal)
    s = _logits(query, key, scale, softcap).masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    out = torch.exp(s - lse.unsqueeze(-1)) @ value
    return _unfold(out, T).to(q.dtype), lse.reshape(B, Hq, T)


def attention_eager(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *, scale: float | None = None, softcap: float = 0.0,
    window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """q (B,T,Hq,P), k and v (B,S,Hkv,P) with S = T, doc_ids (B,T) int32 -> (B,T,Hq,P) in q.dtype.

    scale None is 1/sqrt(P). Logits, softmax and both products are fp32 (fp64 for fp64); one cast at the end.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention_forward_with_lse(q, k, v, doc_ids, scale, softcap, window, causal)[0]


def attention_backward_eager(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float,
    softcap: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (q, k, v) from dout (B,T,Hq,P), the forward's out (B,T,Hq,P) and lse (B,Hq,T).

    p is recomputed as exp(s - lse), so nothing of size T*S is saved between the passes. The softmax gradient
    needs sum_j p_ij dp_ij = dout_i . out_i, which is why `out` is an argument.
    """
    T, Hq = q.shape[1:3]
    Hkv = k.shape[2]
    query, key, value, out, dout = (_fold(t, Hkv) for t in (q, k, v, out, dout))
    capped = _logits(query, key, scale, softcap)
    hidden = _hidden(doc_ids, Hq // Hkv, window, causal)
    p = torch.exp(capped - lse.reshape(*capped.shape[:3], 1)).masked_fill(hidden, 0)
    dv = p.mT @ dout
    ds = p * (dout @ value.mT - (dout * out).sum(-1, keepdim=True))
    if softcap > 0:
        ds = ds * (1 - (capped / softcap).square())
    ds = ds * scale
    dq, dk = ds @ key, ds.mT @ query
    return _unfold(dq, T).to(q.dtype), _unfold(dk, T).to(k.dtype), _unfold(dv, T).to(v.dtype)
