"""The attention core of multi-head latent attention, in plain torch, with its gradient, in two forms.

One latent c per token encodes the keys and values of all its heads; a rotated key r is shared by them:

    train form      k = [W_uk c, r],  v = W_uv c,       s = q_nope.(W_uk c) + q_rope.r,   out = sum p v
    absorbed form   the same sums in another order:     s = (q_nope W_uk).c + q_rope.r,   out = W_uv (sum p c)

    s <- c tanh(s / c) if softcap c,  masked to -inf,  p = softmax(s)

The train form takes P + R + Pv multiply-adds per query, key and head, the absorbed form C + R + C. With a latent of
512 and heads of 128 + 64 and 128 that is 3.4 times as many; with 64 everywhere it is the same. The absorbed form
stores only c and r, no keys or values per head: use it for decoding.

B batch, T tokens, S query tokens (the last S of T; S = T in training), H heads, C latent dim, P head dim of q.k
without position, R head dim with it (rotated by the caller), Pv head dim of the values.
Sources: DeepSeek-V2 (2024), section 2.1; softcap (Gemma 2, 2024); gradient from the saved logsumexp
(FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the accumulation dtype: fp32, or fp64 for fp64."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def _hidden(doc_ids: Tensor, causal: bool) -> Tensor:
    """(B,1,T,T) bool: True where a query may not attend to the key. Padding (id -1) is treated as one more document."""
    T = doc_ids.shape[1]
    hidden = doc_ids.unsqueeze(2) != doc_ids.unsqueeze(1)
    if causal:
        hidden = hidden | torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).triu(1)
    return hidden.unsqueeze(1)


def _heads(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (B,H,T,P+R) and values (B,H,T,Pv) of the train form, in the accumulation dtype."""
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv = _wide(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv)
    query = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
    latent, H = c_kv.unsqueeze(1), W_uk.shape[0]
    key = torch.cat((latent @ W_uk.mT, k_rope.unsqueeze(1).expand(-1, H, -1, -1)), -1)
    return query, key, latent @ W_uv.mT


def _capped(s: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(s / softcap) if softcap > 0 else s


def mla_forward_with_lse(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (B,T,H,Pv) in q_nope.dtype and the logsumexp of the masked logits (B,H,T), fp32 (fp64 for fp64)."""
    query, key, value = _heads(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv)
    s = _capped(query @ key.mT * scale, softcap).masked_fill(_hidden(doc_ids, causal), float("-inf"))
    lse = torch.logsumexp(s, -1)
    out = torch.exp(s - lse.unsqueeze(-1)) @ value
    return out.transpose(1, 2).to(q_nope.dtype), lse


def mla_eager(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """The train form. q_nope (B,T,H,P), q_rope (B,T,H,R), c_kv (B,T,C), k_rope (B,T,R), W_uk (H,P,C), W_uv (H,Pv,C),
    doc_ids (B,T) int32 -> (B,T,H,Pv) in q_nope.dtype.

    scale None is 1/sqrt(P+R). Keys, values, logits, softmax and products are fp32 (fp64 for fp64); one cast at the
    end.
    """
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale
    inputs = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)
    return mla_forward_with_lse(*inputs, scale, softcap, causal)[0]


def mla_absorbed_eager(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    scale: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """The absorbed form. Queries (B,S,H,P) and (B,S,H,R) of the last S of T tokens -> (B,S,H,Pv) in q_nope.dtype."""
    dtype, S = q_nope.dtype, q_nope.shape[1]
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv = _wide(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv)
    query = torch.cat((torch.einsum("bshp,hpc->bhsc", q_nope, W_uk), q_rope.transpose(1, 2)), -1)
    key = torch.cat((c_kv, k_rope), -1).unsqueeze(1)
    hidden = _hidden(doc_ids, causal)[:, :, doc_ids.shape[1] - S :]
    s = _capped(query @ key.mT * scale, softcap).masked_fill(hidden, float("-inf"))
    mean = torch.softmax(s, -1) @ c_kv.unsqueeze(1)
    return torch.einsum("bhsc,hvc->bshv", mean, W_uv).to(dtype)


def mla_backward_eager(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    out: Tensor, lse: Tensor, dout: Tensor, scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the six floating-point inputs from dout (B,T,H,Pv), the forward's out and lse (B,H,T).

    Keys and values are recomputed from c, and p as exp(s - lse). The softmax gradient needs
    sum_j p_ij dp_ij = dout_i . out_i, which is why `out` is an argument.
    """
    query, key, value = _heads(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv)
    c, uk, uv, o, do = _wide(c_kv, W_uk, W_uv, out.transpose(1, 2), dout.transpose(1, 2))
    s = _capped(query @ key.mT * scale, softcap)
    p = torch.exp(s - lse.unsqueeze(-1)).masked_fill(_hidden(doc_ids, causal), 0)
    ds = p * (do @ value.mT - (do * o).sum(-1, keepdim=True)) * scale
    if softcap > 0:
        ds = ds * (1 - (s / softcap).square())
    widths = [q_nope.shape[-1], q_rope.shape[-1]]
    dq_nope, dq_rope = (ds @ key).transpose(1, 2).split(widths, -1)
    dk_nope, dk_rope = (ds.mT @ query).split(widths, -1)
    dvalue = p.mT @ do
    dc = torch.einsum("bhtp,hpc->btc", dk_nope, uk) + torch.einsum("bhtv,hvc->btc", dvalue, uv)
    duk = torch.einsum("bhtp,btc->hpc", dk_nope, c)
    duv = torch.einsum("bhtv,btc->hvc", dvalue, c)
    grads = (dq_nope, dq_rope, dc, dk_rope.sum(1), duk, duv)
    return tuple(g.to(q_nope.dtype) for g in grads)
