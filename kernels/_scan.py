"""What the chunked scans share (ssd_chunk_scan, mamba3_siso, mamba3_mimo, m2rnn), named as in Mamba-2.

A scan carries one state per head, h_t = exp(a_t) h_{t-1} + update_t. By chunks: tokens of one chunk meet in a masked
quadratic product, weighted by exp(segsum(a)), and `state_passing` carries one state from chunk to chunk.

B batch, T tokens, H heads, P head dim, N state dim, R rotation angles, L chunk length, C chunks.
Sources: Mamba-2 (Dao & Gu 2024, arXiv 2405.21060), Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TAU = 2 * math.pi


def token_by_token(step: Callable[..., Any], i: Any, state: Any) -> tuple[Tensor, Any]:
    """Apply a step to each token (B,T,...) of a named tuple of inputs; a document begins with a state of zeros.

    state: a tensor (B,...) or a named tuple of them. The inputs without an axis of tokens are those that its
    class names in `fixed`, and doc_ids.
    """
    keep, outputs = ~document_starts(i.doc_ids), []

    def kept(s: Tensor, t: int) -> Tensor:
        return s * keep[:, t].view(-1, *[1] * (s.dim() - 1))

    per_token = [name for name in i._fields if name not in (*i.fixed, "doc_ids")]
    for t in range(keep.shape[1]):
        state = kept(state, t) if isinstance(state, Tensor) else type(state)(*(kept(s, t) for s in state))
        token = i._replace(doc_ids=None, **{name: getattr(i, name)[:, t] for name in per_token})
        y, state = step(token, state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def zeros(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return zeros of these shapes in the accumulation dtype: fp32, or fp64 for fp64."""
    acc = torch.promote_types(like.dtype, torch.float32)
    return [like.new_zeros(shape, dtype=acc) for shape in shapes]


def document_starts(doc_ids: Tensor) -> Tensor:
    """Return (B,T) bool: the document changes at this token. Token 0 continues the given state."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0))


def to_chunks(t: Tensor, L: int) -> Tensor:
    """(B,T,H,...) -> (B,H,C,L,...), zero-padded at the end: a pad token neither decays nor adds."""
    pad = -t.shape[1] % L
    if pad:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad))
    return t.unflatten(1, (-1, L)).movedim(3, 1)


def to_tokens(t: Tensor, T: int) -> Tensor:
    """(B,H,C,L,...) -> (B,T,H,...), without the padding."""
    return t.movedim(1, 3).flatten(1, 2)[:, :T]


def segsum(a: Tensor) -> Tensor:
    """(...,L) -> (...,L,L): a_{s+1} + ... + a_t at row t, column s; 0 for s >= t.

    Each entry sums its own tokens: a difference of two running sums would cancel, and one document would affect
    another's rounding.
    """
    return a.unsqueeze(-1).expand(*a.shape, a.shape[-1]).tril(-1).cumsum(-2)


def chunk_decays(log_decay: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """(B,T,H) log decay a, -inf where a document begins -> decay (B,H,C,L,L) and state_decay (B,H,C,L).

    decay: from after token s to token t; 0 for s > t and across documents. state_decay: of the state that enters the
    chunk, up to and including token t. No sum reaches +inf and every exponential is at most 1, so nothing can become
    NaN, in the forward or in its gradient.
    """
    a = to_chunks(log_decay, L)
    return torch.exp(segsum(a)).tril(), torch.exp(a.cumsum(-1))


def chunk_decays_bwd(dlog_decay: Tensor, dlog_state_decay: Tensor) -> Tensor:
    """Gradient of the log decay a (B,H,C,L): a_t is in each pair s < t <= i, and in state_decay from t on."""
    crossing = dlog_decay.cumsum(-1).tril(-1).sum(-2)  # at s: all pairs that start at <= s and end after s
    return F.pad(crossing[..., :-1], (1, 0)) + dlog_state_decay.flip(-1).cumsum(-1).flip(-1)


def state_passing(chunk_state: Tensor, state_decay: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state that enters each chunk (B,H,C,P,N), and the state after the last token (B,H,P,N).

    chunk_state (B,H,C,P,N): what each chunk adds by its end; state_decay (B,H,C,L); initial (B,H,P,N).
    """
    state, states = initial, []
    for c in range(chunk_state.shape[2]):
        states.append(state)
        state = state_decay[:, :, c, -1, None, None] * state + chunk_state[:, :, c]
    return torch.stack(states, 2), state


def state_passing_bwd(
    dstates: Tensor, dfinal: Tensor, states: Tensor, state_decay: Tensor, dlog_state_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of chunk_state (B,H,C,P,N) and of the initial state (B,H,P,N).

    dstates: gradient of the entering `states`, apart from the carry. Adds the carry's part to the end of each chunk in
    dlog_state_decay (B,H,C,L), in place.
    """
    dstate, dchunk_state = dfinal, []
    for c in reversed(range(states.shape[2])):
        dchunk_state.append(dstate)
        total = state_decay[:, :, c, -1]
        dlog_state_decay[:, :, c, -1] += total * (dstate * states[:, :, c]).sum((-1, -2))
        dstate = total[..., None, None] * dstate + dstates[:, :, c]
    return torch.stack(dchunk_state[::-1], 2), dstate


def trapezoid_weights(dt: Tensor, trap: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of Mamba-3's trapezoid rule, each (B,T,H), from dt, trap and the document starts (B,T,1).

    lam = sigmoid(trap); beta = (1 - lam) dt, of the previous token; gamma = lam dt, of the token itself; and
    scale_t = gamma_t + beta_{t+1}, of token t for every later token of its document.
    """
    lam = torch.sigmoid(trap)
    beta, gamma = (1 - lam) * dt, lam * dt
    return lam, beta, gamma, gamma + F.pad(beta.masked_fill(starts, 0)[:, 1:], (0, 0, 0, 1))


def running_angles(rate: Tensor, dt: Tensor, segment: Tensor, theta: Tensor) -> Tensor:
    """Angle theta of each token (B,T,H,R) in [-pi, pi]: the given theta (B,H,R), then pi rate dt at each token.

    rate (B,T,H,R), dt (B,T,H); segment (B,T): the number of documents begun so far in the row. The sum is in turns,
    not radians: removing whole turns is then exact, and no error of a rounded 2 pi accumulates.
    """
    turns = segment_sums(rate * dt.unsqueeze(-1) / 2, segment, wrap=True)
    turns = turns + theta.to(rate.dtype).unsqueeze(1) / TAU * (segment == 0)[..., None, None]
    return TAU * (turns - torch.round(turns))


def segment_sums(x: Tensor, segment: Tensor, wrap: bool = False) -> Tensor:
    """Running sums of x (B,T,H,R) over tokens, restarting at each segment id (B,T); modulo 1 if `wrap`.

    By doubling: after step i each token holds the sum of its last 2^i tokens. No sum crosses a segment, so a
    document's angles have the same bits at any position in a row; wrapping at each step keeps them small.
    """
    reach = 1
    while reach < x.shape[1]:
        same = (segment[:, reach:] == segment[:, :-reach])[..., None, None]
        x = torch.cat((x[:, :reach], x[:, reach:] + x[:, :-reach] * same), 1)
        x = x - torch.round(x) if wrap else x
        reach *= 2
    return x


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R adjacent pairs of x (...,N) by the angles (...,R); leave the rest unchanged."""
    R = cos.shape[-1]
    even, odd = x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((rotated, x[..., 2 * R :]), -1)


def rotate_pairs_bwd(rotated: Tensor, grad: Tensor, R: int) -> Tensor:
    """Gradient of the angles (...,R) from a rotated vector and its gradient, both (...,N)."""
    even, odd = rotated[..., : 2 * R : 2], rotated[..., 1 : 2 * R : 2]
    return even * grad[..., 1 : 2 * R : 2] - odd * grad[..., : 2 * R : 2]
