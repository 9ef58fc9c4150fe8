"""M2RNN in plain torch, with its gradient: what does not depend on the state is computed outside the loop.

naive.py has the definition.

B batch, T tokens, H heads, K key dim, V value dim (the state is K by V).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._scan import document_starts
from kernels.m2rnn.naive import first_state


def m2rnn_eager(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence with the products and the read-out moved out of the loop.

    q and k (B,T,H,K), v (B,T,H,V), W (H,V,V), f (B,T,H) in (0,1), doc_ids (B,T) integer,
    h0 (B,H,K,V) or None for zeros
    -> y (B,T,H,V) in v.dtype, final state (B,H,K,V) in fp32 (fp64 for fp64 v).
    """
    y, states = m2rnn_forward_with_states(q, k, v, W, f, doc_ids, first_state(k, v, h0))
    return y, states[:, -1]


def m2rnn_forward_with_states(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B,T,H,V) in v.dtype and the state after every token (B,T,H,K,V), which the backward needs."""
    acc = torch.promote_types(v.dtype, torch.float32)
    query, key, value, f, state = (t.to(acc) for t in (q, k, v, f, h0))
    written = _by_time(key.unsqueeze(-1) * value.unsqueeze(-2))
    forget, keep = _by_time(f[..., None, None]), _keep(doc_ids, f)
    B, H = h0.shape[:2]
    W = W.to(acc).repeat(B, 1, 1)
    state, states = state.flatten(0, 1), []
    for t in range(v.shape[1]):
        before = keep[t] * state
        state = torch.lerp(torch.tanh(torch.baddbmm(written[t], before, W)), before, forget[t])
        states.append(state)
    states = torch.stack(states, 0).unflatten(1, (B, H)).transpose(0, 1)
    y = (query.unsqueeze(-2) @ states).squeeze(-2)
    return y.to(v.dtype), states


def m2rnn_backward_eager(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor, states: Tensor,
    dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (q, k, v, W, f, h0) from the gradients of y (B,T,H,V) and of the final state (B,H,K,V).

    `states` are the forward's: they give the candidates n_t of all tokens at once, without a loop.
    """
    acc = torch.promote_types(v.dtype, torch.float32)
    query, key, value, weight, gate, first, dy = (t.to(acc) for t in (q, k, v, W, f, h0, dy))
    B, T, H, _ = v.shape
    keep = _keep(doc_ids, gate)
    states = states.to(acc)
    before = torch.cat((first.unsqueeze(1), states[:, :-1]), 1)
    before = before.masked_fill(document_starts(doc_ids)[..., None, None, None], 0)
    new = torch.tanh(before @ weight + key.unsqueeze(-1) * value.unsqueeze(-2))

    # h = f before + (1 - f) tanh(pre): dpre = slope dh, and the carry is f dh + dpre W^T where it is kept
    forget = gate[..., None, None]
    slope = (1 - forget) * (1 - new.square())
    by_read = _by_time(query.unsqueeze(-1) * dy.unsqueeze(-2))
    carried_forget, carried_slope = keep * _by_time(forget), keep * _by_time(slope)
    transposed = weight.mT.repeat(B, 1, 1)
    carry, dstates = dfinal.to(acc).flatten(0, 1), []
    for t in reversed(range(T)):
        dstate = by_read[t] + carry
        dstates.append(dstate)
        carry = torch.baddbmm(carried_forget[t] * dstate, carried_slope[t] * dstate, transposed)
    dstates = torch.stack(dstates[::-1], 0).unflatten(1, (B, H)).transpose(0, 1)

    dpre = slope * dstates
    dq = (states @ dy.unsqueeze(-1)).squeeze(-1)
    dk = (dpre @ value.unsqueeze(-1)).squeeze(-1)
    dv = (key.unsqueeze(-2) @ dpre).squeeze(-2)
    dW = (before.mT @ dpre).sum((0, 1))
    df = (dstates * (before - new)).sum((-1, -2))
    grads = (dq, dk, dv, dW, df, carry.unflatten(0, (B, H)))
    return tuple(grad.to(i.dtype) for grad, i in zip(grads, (q, k, v, W, f, h0)))


def _by_time(x: Tensor) -> Tensor:
    """Transpose (B,T,H,...) -> (T,B*H,...), so that the slice of a token is one batched matrix operand."""
    return x.transpose(0, 1).flatten(1, 2)


def _keep(doc_ids: Tensor, f: Tensor) -> Tensor:
    """(T,B*H,1,1) in f's dtype: 0 at a token that begins a document, else 1."""
    keep = (~document_starts(doc_ids)).to(f.dtype).unsqueeze(-1).expand(f.shape)
    return _by_time(keep[..., None, None])
