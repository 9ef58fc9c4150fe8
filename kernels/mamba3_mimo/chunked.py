"""The scan of mamba3_mimo by chunks, forward and backward, from per-token weights, queries and keys.

Within a chunk that starts from the state `entering`,

    out_{t,r} = sum_{s,r'} weight_ts (query_{t,r} . key_{s,r'}) value_{s,r'} + since_t entering query_{t,r}

where weight_ts is the decay from s to t times scale_s for s before t, gamma_t for t itself, and 0 after it.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, L chunk length, C chunks. Inside a chunk the
L tokens of rank R are L*R rows (t, r).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Chunked(NamedTuple):
    """Operands of the scan, split into chunks. A row is a pair (token, rank)."""

    rank: int  # R
    query: Tensor  # (B,H,C,L*R,N)
    key: Tensor  # (B,H,C,L*R,N)
    rows: Tensor  # (B,H,C,L*R,P)
    scale: Tensor  # (B,H,C,L)
    inside: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    since: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    weight: Tensor  # (B,H,C,L,L) of token s for token t: inside scale below the diagonal, gamma on it
    scores: Tensor  # (B,H,C,L*R,L*R) query . key
    initial: Tensor  # (B,H,P,N) given h, including the given keys and value


def chunked(
    query: Tensor, key: Tensor, rows: Tensor, gamma: Tensor, scale: Tensor, log_decay: Tensor, initial: Tensor,
    chunk_size: int,
) -> Chunked:  # fmt: skip
    """query, key (B,T,H,R,N), rows (B,T,H,R,P), gamma, scale and log_decay (B,T,H), initial (B,H,P,N)."""
    L, R = min(chunk_size, gamma.shape[1]), rows.shape[3]
    inside, since = _decays(log_decay, L)
    query, key, rows = (_chunks(t, L).flatten(3, 4) for t in (query, key, rows))
    scale = _chunks(scale, L)
    # A difference scale - beta on the diagonal would cancel, and lose all digits if lam is small.
    weight = (inside * scale.unsqueeze(-2)).tril(-1) + torch.diag_embed(_chunks(gamma, L))
    return Chunked(R, query, key, rows, scale, inside, since, weight, query @ key.mT, initial)


def scan(s: Chunked, entering: Tensor, T: int) -> Tensor:
    """h_t q_{t,r} for each token and rank (B,T,H,R,P)."""
    mixed = s.scores * _each_rank(_each_rank(s.weight, s.rank), s.rank, dim=-2)
    out = mixed @ s.rows + _each_rank(s.since, s.rank).unsqueeze(-1) * (s.query @ entering.mT)
    return _tokens(out.unflatten(3, (-1, s.rank)), T)


def carry(s: Chunked) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and h after the last token (B,H,P,N).

    An entering state already includes the beta of the chunk's first token; nothing follows the last token.
    """
    leaving = _each_rank(s.inside[..., -1, :] * s.scale, s.rank).unsqueeze(-1)
    added = (leaving * s.rows).mT @ s.key
    state, entering = s.initial, []
    for c in range(added.shape[2]):
        entering.append(state)
        state = s.since[:, :, c, -1, None, None] * state + added[:, :, c]
    return torch.stack(entering, 2), state


class ScanGradients(NamedTuple):
    query: Tensor  # (B,T,H,R,N)
    key: Tensor  # (B,T,H,R,N)
    rows: Tensor  # (B,T,H,R,P)
    gamma: Tensor  # (B,T,H) by the diagonal alone
    scale: Tensor  # (B,T,H)
    log_decay: Tensor  # (B,T,H)
    initial: Tensor  # (B,H,P,N)


def scan_backward(s: Chunked, entering: Tensor, dscan: Tensor, dfinal: Tensor) -> ScanGradients:
    T, R, L = dscan.shape[1], s.rank, s.since.shape[3]
    dy = _chunks(dscan, L).flatten(3, 4)
    since = _each_rank(s.since, R).unsqueeze(-1)
    weight = _each_rank(_each_rank(s.weight, R), R, dim=-2)

    # (scores * weight) rows, and since * (query entering^T)
    dmixed = dy @ s.rows.mT
    dscores = dmixed * weight
    drows = (s.scores * weight).mT @ dy
    dquery = dscores @ s.key + since * (dy @ entering)
    dkey = dscores.mT @ s.query
    dweight = _sum_ranks(_sum_ranks(dmixed * s.scores, R), R, dim=-2)
    dgamma, dbelow = dweight.diagonal(dim1=-2, dim2=-1), (dweight * s.inside).tril(-1)
    dscale, dlog_inside = dbelow.sum(-2), dbelow * s.scale.unsqueeze(-2)
    dlog_since = _sum_ranks((since * (dy * (s.query @ entering.mT))).sum(-1), R)
    dentering = (since * dy).mT @ s.query

    # The carry, backward: h' = since_end h + (leaving * rows)^T key, leaving = inside_end scale
    dstate, dadded = dfinal, []
    for c in reversed(range(entering.shape[2])):
        dadded.append(dstate)
        total = s.since[:, :, c, -1]
        dlog_since[:, :, c, -1] += total * (dstate * entering[:, :, c]).sum((-1, -2))
        dstate = total[..., None, None] * dstate + dentering[:, :, c]
    dadded = torch.stack(dadded[::-1], 2)
    end = s.inside[..., -1, :]
    leaving = _each_rank(end * s.scale, R).unsqueeze(-1)
    dleft = s.key @ dadded.mT
    drows = drows + leaving * dleft
    dkey = dkey + (leaving * s.rows) @ dadded
    dend = _sum_ranks((s.rows * dleft).sum(-1), R)
    dscale = dscale + end * dend
    dlog_inside[..., -1, :] += end * s.scale * dend

    dlog = _log_decay_gradient(dlog_inside, dlog_since)
    per_rank = (_tokens(d.unflatten(3, (L, R)), T) for d in (dquery, dkey, drows))
    return ScanGradients(*per_rank, *(_tokens(d, T) for d in (dgamma, dscale, dlog)), dstate)


def _each_rank(t: Tensor, R: int, dim: int = -1) -> Tensor:
    """Repeat the value of each token along `dim` R times: tokens -> rows."""
    return t.repeat_interleave(R, dim)


def _sum_ranks(t: Tensor, R: int, dim: int = -1) -> Tensor:
    """Sum rows along `dim` over ranks: rows -> tokens, the gradient of `_each_rank`."""
    return t.unflatten(dim, (-1, R)).sum(dim)


def _decays(log_decay: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """(B,T,H) log decay a, -inf where a document begins -> `inside` and `since` of `Chunked`.

    Each entry sums its own tokens a_{s+1} + ... + a_t: a difference of two running sums would cancel, and one
    document would affect another's rounding. No sum reaches +inf and every exponential is at most 1, so nothing
    can become NaN, in the forward or in its gradient.
    """
    a = _chunks(log_decay, L)
    summed = a.unsqueeze(-1).expand(*a.shape, L).tril(-1).cumsum(-2)
    return torch.exp(summed).tril(), torch.exp(a.cumsum(-1))


def _log_decay_gradient(dlog_inside: Tensor, dlog_since: Tensor) -> Tensor:
    """Gradient of the log decay a (B,H,C,L): a_t is in each pair s < t <= i, and in `since` from t on."""
    crossing = dlog_inside.cumsum(-1).tril(-1).sum(-2)  # at s: all pairs that start at <= s and end after s
    return F.pad(crossing[..., :-1], (1, 0)) + dlog_since.flip(-1).cumsum(-1).flip(-1)


def _chunks(t: Tensor, L: int) -> Tensor:
    """(B,T,H,...) -> (B,H,C,L,...), zero-padded at the end: a pad token neither decays nor adds."""
    pad = -t.shape[1] % L
    if pad:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad))
    return t.unflatten(1, (-1, L)).movedim(3, 1)


def _tokens(t: Tensor, T: int) -> Tensor:
    """(B,H,C,L,...) -> (B,T,H,...), without the padding."""
    return t.movedim(1, 3).flatten(1, 2)[:, :T]
