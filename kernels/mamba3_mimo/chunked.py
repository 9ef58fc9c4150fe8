"""The scan of mamba3_mimo by chunks, forward and backward, from per-token weights, queries and keys.

Within a chunk that starts from the state `states`,

    out_{t,r} = sum_{s,r'} weight_ts (query_{t,r} . key_{s,r'}) value_{s,r'} + state_decay_t state query_{t,r}

where weight_ts is the decay from s to t times scale_s for s before t, gamma_t for t itself, and 0 after it.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, L chunk length, C chunks. Inside a chunk the
L tokens of rank R are L*R rows (t, r).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels._scan import (
    chunk_decays,
    chunk_decays_bwd,
    state_passing,
    state_passing_bwd,
    to_chunks,
    to_tokens,
)


class Chunked(NamedTuple):
    """Operands of the scan, split into chunks. A row is a pair (token, rank)."""

    rank: int  # R
    query: Tensor  # (B,H,C,L*R,N)
    key: Tensor  # (B,H,C,L*R,N)
    rows: Tensor  # (B,H,C,L*R,P)
    scale: Tensor  # (B,H,C,L)
    decay: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    state_decay: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    weight: Tensor  # (B,H,C,L,L) of token s for token t: decay scale below the diagonal, gamma on it
    scores: Tensor  # (B,H,C,L*R,L*R) query . key
    initial: Tensor  # (B,H,P,N) given h, including the given keys and value


def chunked(
    query: Tensor, key: Tensor, rows: Tensor, gamma: Tensor, scale: Tensor, log_decay: Tensor, initial: Tensor,
    chunk_size: int,
) -> Chunked:  # fmt: skip
    """query, key (B,T,H,R,N), rows (B,T,H,R,P), gamma, scale and log_decay (B,T,H), initial (B,H,P,N)."""
    L, R = min(chunk_size, gamma.shape[1]), rows.shape[3]
    decay, state_decay = chunk_decays(log_decay, L)
    query, key, rows = (to_chunks(t, L).flatten(3, 4) for t in (query, key, rows))
    scale = to_chunks(scale, L)
    # A difference scale - beta on the diagonal would cancel, and lose all digits if lam is small.
    weight = (decay * scale.unsqueeze(-2)).tril(-1) + torch.diag_embed(to_chunks(gamma, L))
    return Chunked(R, query, key, rows, scale, decay, state_decay, weight, query @ key.mT, initial)


def scan(s: Chunked, states: Tensor, T: int) -> Tensor:
    """h_t q_{t,r} for each token and rank (B,T,H,R,P)."""
    mixed = s.scores * _each_rank(_each_rank(s.weight, s.rank), s.rank, dim=-2)
    out = mixed @ s.rows + _each_rank(s.state_decay, s.rank).unsqueeze(-1) * (s.query @ states.mT)
    return to_tokens(out.unflatten(3, (-1, s.rank)), T)


def carry(s: Chunked) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and h after the last token (B,H,P,N).

    An entering state already includes the beta of the chunk's first token; nothing follows the last token.
    """
    end_decay = _each_rank(s.decay[..., -1, :] * s.scale, s.rank).unsqueeze(-1)
    chunk_state = (end_decay * s.rows).mT @ s.key
    return state_passing(chunk_state, s.state_decay, s.initial)


class ScanGradients(NamedTuple):
    query: Tensor  # (B,T,H,R,N)
    key: Tensor  # (B,T,H,R,N)
    rows: Tensor  # (B,T,H,R,P)
    gamma: Tensor  # (B,T,H) by the diagonal alone
    scale: Tensor  # (B,T,H)
    log_decay: Tensor  # (B,T,H)
    initial: Tensor  # (B,H,P,N)


def scan_backward(s: Chunked, states: Tensor, dscan: Tensor, dfinal: Tensor) -> ScanGradients:
    T, R, L = dscan.shape[1], s.rank, s.state_decay.shape[3]
    dy = to_chunks(dscan, L).flatten(3, 4)
    state_decay = _each_rank(s.state_decay, R).unsqueeze(-1)
    weight = _each_rank(_each_rank(s.weight, R), R, dim=-2)

    # (scores * weight) rows, and state_decay * (query states^T)
    dmixed = dy @ s.rows.mT
    dscores = dmixed * weight
    drows = (s.scores * weight).mT @ dy
    dquery = dscores @ s.key + state_decay * (dy @ states)
    dkey = dscores.mT @ s.query
    dweight = _sum_ranks(_sum_ranks(dmixed * s.scores, R), R, dim=-2)
    dgamma, dbelow = dweight.diagonal(dim1=-2, dim2=-1), (dweight * s.decay).tril(-1)
    dscale, dlog_decay = dbelow.sum(-2), dbelow * s.scale.unsqueeze(-2)
    dlog_state_decay = _sum_ranks((state_decay * (dy * (s.query @ states.mT))).sum(-1), R)
    dstates = (state_decay * dy).mT @ s.query

    # state_passing, backward: h' = state_decay_end h + (end_decay * rows)^T key
    dchunk_state, dstate = state_passing_bwd(dstates, dfinal, states, s.state_decay, dlog_state_decay)
    end = s.decay[..., -1, :]
    end_decay = _each_rank(end * s.scale, R).unsqueeze(-1)
    dwritten = s.key @ dchunk_state.mT
    drows = drows + end_decay * dwritten
    dkey = dkey + (end_decay * s.rows) @ dchunk_state
    dend = _sum_ranks((s.rows * dwritten).sum(-1), R)
    dscale = dscale + end * dend
    dlog_decay[..., -1, :] += end * s.scale * dend

    dlog = chunk_decays_bwd(dlog_decay, dlog_state_decay)
    per_rank = (to_tokens(d.unflatten(3, (L, R)), T) for d in (dquery, dkey, drows))
    return ScanGradients(*per_rank, *(to_tokens(d, T) for d in (dgamma, dscale, dlog)), dstate)


def _each_rank(t: Tensor, R: int, dim: int = -1) -> Tensor:
    """Repeat the value of each token along `dim` R times: tokens -> rows."""
    return t.repeat_interleave(R, dim)


def _sum_ranks(t: Tensor, R: int, dim: int = -1) -> Tensor:
    """Sum rows along `dim` over ranks: rows -> tokens, the gradient of `_each_rank`."""
    return t.unflatten(dim, (-1, R)).sum(dim)
