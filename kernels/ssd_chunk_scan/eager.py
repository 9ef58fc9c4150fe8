"""SSD, the scan of Mamba-2, in plain torch by chunks, with its gradient. naive.py has the definition.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)),
L chunk length, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels._scan import (
    chunk_decays,
    chunk_decays_bwd,
    document_starts,
    state_passing,
    state_passing_bwd,
    to_chunks,
    to_tokens,
)
from kernels.ssd_chunk_scan.naive import SsdInputs, first_state


def ssd_chunk_scan_eager(
    i: SsdInputs, initial_state: Tensor | None = None, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """The chunked form: a masked quadratic product inside a chunk, one state carried between chunks.

    initial_state (B,H,P,N), None for zeros.
    Returns y (B,T,H,P) in x.dtype, final state (B,H,P,N) in fp32 (fp64 for fp64 x).
    """
    s = _prepare(i, chunk_size)
    states, final = _carry(s, first_state(i, initial_state))
    y = (s.scores * s.decay) @ s.scaled + s.state_decay.unsqueeze(-1) * (s.query @ states.mT)
    y = y + i.D.to(y.dtype)[:, None, None, None] * s.value
    return to_tokens(y, i.x.shape[1]).to(i.x.dtype), final


def ssd_chunk_scan_backward_eager(
    i: SsdInputs, initial_state: Tensor, chunk_size: int, dy: Tensor, dfinal: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of (x, dt, A, Bmat, Cmat, D, initial_state) from the gradients of y (B,T,H,P) and the final state.

    Only the inputs are saved by the forward: decays, scores and chunk states are recomputed.
    """
    T, G = i.x.shape[1], i.Bmat.shape[2]
    s = _prepare(i, chunk_size)
    acc = s.value.dtype
    initial = initial_state.to(acc)
    states, _ = _carry(s, initial)
    dy = to_chunks(dy.to(acc), s.length)
    state_decay, end_decay = s.state_decay.unsqueeze(-1), s.decay[..., -1, :].unsqueeze(-1)

    # y = (scores * decay) scaled + state_decay * (query states^T) + D value
    mixed = s.scores * s.decay
    dmixed = dy @ s.scaled.mT
    dscores = dmixed * s.decay
    dscaled = mixed.mT @ dy
    dquery = dscores @ s.key + state_decay * (dy @ states)
    dkey = dscores.mT @ s.query
    dlog_decay = dmixed * mixed
    dlog_state_decay = (state_decay * (dy * (s.query @ states.mT))).sum(-1)
    dstates = (state_decay * dy).mT @ s.query

    # state_passing, backward: h' = state_decay_end h + (end_decay * scaled)^T key
    dchunk_state, dstate = state_passing_bwd(dstates, dfinal.to(acc), states, s.state_decay, dlog_state_decay)
    dwritten = s.key @ dchunk_state.mT
    dscaled = dscaled + end_decay * dwritten
    dkey = dkey + (end_decay * s.scaled) @ dchunk_state
    dlog_decay[..., -1, :] += (end_decay * s.scaled * dwritten).sum(-1)

    dlog = to_tokens(chunk_decays_bwd(dlog_decay, dlog_state_decay), T)
    dt_full = i.dt.to(acc)
    dscaled, value = to_tokens(dscaled, T), i.x.to(acc)
    dx = dt_full.unsqueeze(-1) * dscaled + i.D.to(acc)[:, None] * to_tokens(dy, T)
    ddt = dlog * i.A.to(acc) + (dscaled * value).sum(-1)
    dA = (dlog * dt_full).sum((0, 1))
    dD = (to_tokens(dy, T) * value).sum(3).sum((0, 1))
    dB, dC = (to_tokens(d, T).unflatten(2, (G, -1)).sum(3) for d in (dkey, dquery))
    grads = (dx, ddt, dA, dB, dC, dD, dstate)
    return tuple(g.to(t.dtype) for g, t in zip(grads, (*i[:-1], initial_state)))


class _Chunked(NamedTuple):
    """Inputs of one call, split into chunks, in the accumulation dtype."""

    length: int  # L
    value: Tensor  # (B,H,C,L,P) x
    scaled: Tensor  # (B,H,C,L,P) dt x
    key: Tensor  # (B,H,C,L,N)
    query: Tensor  # (B,H,C,L,N)
    decay: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    state_decay: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    scores: Tensor  # (B,H,C,L,L) query_t . key_s


def _prepare(i: SsdInputs, chunk_size: int) -> _Chunked:
    acc = torch.promote_types(i.x.dtype, torch.float32)
    H, L = i.x.shape[2], min(chunk_size, i.x.shape[1])
    dt = i.dt.to(acc)
    starts = document_starts(i.doc_ids).unsqueeze(-1)
    decay, state_decay = chunk_decays((i.A.to(acc) * dt).masked_fill(starts, float("-inf")), L)
    value = to_chunks(i.x.to(acc), L)
    key, query = (to_chunks(m.to(acc).repeat_interleave(H // m.shape[2], 2), L) for m in (i.Bmat, i.Cmat))
    return _Chunked(
        L, value, to_chunks(dt, L).unsqueeze(-1) * value, key, query, decay, state_decay, query @ key.mT
    )


def _carry(s: _Chunked, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and the state after the last token (B,H,P,N)."""
    chunk_state = (s.decay[..., -1, :].unsqueeze(-1) * s.scaled).mT @ s.key
    return state_passing(chunk_state, s.state_decay, initial)
