"""SSD, the scan of Mamba-2, in plain torch: as a recurrence (the definition) and by chunks.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

h is zero before the first token of a document; the initial state belongs to the first document of its row.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)),
L chunk length, C chunks.
Source: Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd_chunk_scan_step(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token: the definition, and the decode path.

    x (B,H,P), dt (B,H) after softplus, A (H,) negative, Bmat and Cmat (B,G,N), D (H,), state (B,H,P,N)
    -> y (B,H,P) in x.dtype, new state (B,H,P,N) in fp32 (fp64 for fp64 x). The caller zeroes the state
    where a new document begins.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    H = x.shape[1]
    value, dt, A, D = x.to(acc), dt.to(acc), A.to(acc), D.to(acc)
    key, query = (m.to(acc).repeat_interleave(H // m.shape[1], 1) for m in (Bmat, Cmat))
    decay = torch.exp(A * dt)[..., None, None]
    state = decay * state.to(acc) + (dt.unsqueeze(-1) * value).unsqueeze(-1) * key.unsqueeze(-2)
    y = (state @ query.unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * value
    return y.to(x.dtype), state


def ssd_chunk_scan_recurrent(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bmat: Tensor,
    Cmat: Tensor,
    D: Tensor,
    doc_ids: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the step token by token; arguments and results as for `ssd_chunk_scan_reference`."""
    state = _initial(x, Bmat, initial_state)
    keep = ~_document_starts(doc_ids)
    outputs = []
    for t in range(x.shape[1]):
        state = state * keep[:, t, None, None, None]
        y, state = ssd_chunk_scan_step(x[:, t], dt[:, t], A, Bmat[:, t], Cmat[:, t], D, state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def ssd_chunk_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bmat: Tensor,
    Cmat: Tensor,
    D: Tensor,
    doc_ids: Tensor,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The chunked form: a masked quadratic product inside a chunk, one state carried between chunks.

    x (B,T,H,P), dt (B,T,H) after softplus, A (H,) negative, Bmat and Cmat (B,T,G,N), D (H,),
    doc_ids (B,T) integer, initial_state (B,H,P,N) or None for zeros
    -> y (B,T,H,P) in x.dtype, final state (B,H,P,N) in fp32 (fp64 for fp64 x).
    """
    T = x.shape[1]
    s = _prepare(x, dt, A, Bmat, Cmat, doc_ids, chunk_size)
    entering, final = _carry(s, _initial(x, Bmat, initial_state))
    y = (s.scores * s.inside) @ s.weighted + s.since.unsqueeze(-1) * (s.query @ entering.mT)
    y = y + D.to(y.dtype)[:, None, None, None] * s.value
    return _tokens(y, T).to(x.dtype), final


def ssd_chunk_scan_backward_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bmat: Tensor,
    Cmat: Tensor,
    D: Tensor,
    doc_ids: Tensor,
    initial_state: Tensor,
    chunk_size: int,
    dy: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, dt, A, Bmat, Cmat, D, initial_state) from those of y (B,T,H,P) and the final state.

    Only the inputs are saved by the forward: decays, scores and chunk states are recomputed.
    """
    T, G = x.shape[1], Bmat.shape[2]
    s = _prepare(x, dt, A, Bmat, Cmat, doc_ids, chunk_size)
    acc = s.value.dtype
    initial = initial_state.to(acc)
    entering, _ = _carry(s, initial)
    dy = _chunks(dy.to(acc), s.length)
    since, leaving = s.since.unsqueeze(-1), s.inside[..., -1, :].unsqueeze(-1)

    # y = (scores * inside) weighted + since * (query entering^T) + D value
    mixed = s.scores * s.inside
    dmixed = dy @ s.weighted.mT
    dscores = dmixed * s.inside
    dweighted = mixed.mT @ dy
    dquery = dscores @ s.key + since * (dy @ entering)
    dkey = dscores.mT @ s.query
    dlog_inside = dmixed * mixed
    dlog_since = (since * (dy * (s.query @ entering.mT))).sum(-1)
    dentering = (since * dy).mT @ s.query

    # The carry, backward: h' = since_end h + (leaving * weighted)^T key
    dstate, dadded = dfinal.to(acc), []
    for c in reversed(range(entering.shape[2])):
        dadded.append(dstate)
        total = s.since[:, :, c, -1]
        dlog_since[:, :, c, -1] += total * (dstate * entering[:, :, c]).sum((-1, -2))
        dstate = total[..., None, None] * dstate + dentering[:, :, c]
    dadded = torch.stack(dadded[::-1], 2)
    dleft = s.key @ dadded.mT
    dweighted = dweighted + leaving * dleft
    dkey = dkey + (leaving * s.weighted) @ dadded
    dlog_inside[..., -1, :] += (leaving * s.weighted * dleft).sum(-1)

    dlog = _log_decay_gradient(dlog_inside, dlog_since, T)
    dt_full = dt.to(acc)
    dweighted, value = _tokens(dweighted, T), x.to(acc)
    dx = dt_full.unsqueeze(-1) * dweighted + D.to(acc)[:, None] * _tokens(dy, T)
    ddt = dlog * A.to(acc) + (dweighted * value).sum(-1)
    dA = (dlog * dt_full).sum((0, 1))
    dD = (_tokens(dy, T) * value).sum((0, 1, 3))
    dB, dC = (_tokens(d, T).unflatten(2, (G, -1)).sum(3) for d in (dkey, dquery))
    grads = (dx, ddt, dA, dB, dC, dD, dstate)
    inputs = (x, dt, A, Bmat, Cmat, D, initial_state)
    return tuple(g.to(i.dtype) for g, i in zip(grads, inputs))


class _Chunked(NamedTuple):
    """Inputs of one call, split into chunks, in the accumulation dtype."""

    length: int  # L
    value: Tensor  # (B,H,C,L,P) x
    weighted: Tensor  # (B,H,C,L,P) dt x
    key: Tensor  # (B,H,C,L,N)
    query: Tensor  # (B,H,C,L,N)
    inside: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    since: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    scores: Tensor  # (B,H,C,L,L) query_t . key_s


def _prepare(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, doc_ids: Tensor, chunk_size: int
) -> _Chunked:
    acc = torch.promote_types(x.dtype, torch.float32)
    H, L = x.shape[2], min(chunk_size, x.shape[1])
    dt = dt.to(acc)
    inside, since = _decays(A.to(acc) * dt, doc_ids, L)
    value = _chunks(x.to(acc), L)
    key, query = (_chunks(m.to(acc).repeat_interleave(H // m.shape[2], 2), L) for m in (Bmat, Cmat))
    return _Chunked(L, value, _chunks(dt, L).unsqueeze(-1) * value, key, query, inside, since, query @ key.mT)


def _carry(s: _Chunked, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and the state after the last token (B,H,P,N)."""
    added = (s.inside[..., -1, :].unsqueeze(-1) * s.weighted).mT @ s.key
    state, entering = initial, []
    for c in range(added.shape[2]):
        entering.append(state)
        state = s.since[:, :, c, -1, None, None] * state + added[:, :, c]
    return torch.stack(entering, 2), state


def _decays(log_decay: Tensor, doc_ids: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """(B,T,H) log decay a -> `inside` and `since` of `_Chunked`.

    Each entry sums its own tokens a_{s+1} + ... + a_t: a difference of two running sums would cancel, and one
    document would affect another's rounding. A document start is a log decay of -inf, so no sum reaches +inf and
    every exponential is at most 1: nothing can become NaN, in the forward or in its gradient.
    """
    starts = _document_starts(doc_ids).unsqueeze(-1)
    a = _chunks(log_decay.masked_fill(starts, float("-inf")), L)
    summed = a.unsqueeze(-1).expand(*a.shape, L).tril(-1).cumsum(-2)
    return torch.exp(summed).tril(), torch.exp(a.cumsum(-1))


def _log_decay_gradient(dlog_inside: Tensor, dlog_since: Tensor, T: int) -> Tensor:
    """Gradient of the log decay (B,T,H): a_t takes part in each pair s < t <= i, and in `since` from t on."""
    crossing = dlog_inside.cumsum(-1).tril(-1).sum(-2)  # at s: all pairs that start at <= s and end after s
    da = F.pad(crossing[..., :-1], (1, 0)) + dlog_since.flip(-1).cumsum(-1).flip(-1)
    return _tokens(da, T)


def _document_starts(doc_ids: Tensor) -> Tensor:
    """(B,T) bool: the document changes at this token. Token 0 continues the initial state."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0))


def _initial(x: Tensor, Bmat: Tensor, state: Tensor | None) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    if state is not None:
        return state.to(acc)
    return x.new_zeros((x.shape[0], x.shape[2], x.shape[3], Bmat.shape[3]), dtype=acc)


def _chunks(t: Tensor, L: int) -> Tensor:
    """(B,T,H,...) -> (B,H,C,L,...), zero-padded at the end: a pad token neither decays nor adds."""
    pad = -t.shape[1] % L
    if pad:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad))
    return t.unflatten(1, (-1, L)).movedim(3, 1)


def _tokens(t: Tensor, T: int) -> Tensor:
    """(B,H,C,L,...) -> (B,T,H,...), without the padding."""
    return t.movedim(1, 3).flatten(1, 2)[:, :T]
