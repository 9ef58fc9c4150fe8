"""The Mamba-3 single-input single-output scan in plain torch: as a recurrence (the definition) and by chunks.

With alpha = exp(adt), lam = sigmoid(trap), theta_t = (theta_{t-1} + pi tanh(angle_t) dt_t) mod 2 pi, and the
first R adjacent pairs of state dims of (q + q_bias) and (k + k_bias) rotated by theta_t:

    h_t = alpha_t h_{t-1} + (1 - lam_t) dt_t alpha_t v_{t-1} k_{t-1}^T + lam_t dt_t v_t k_t^T
    y_t = (h_t q_t + D v_t) silu(z_t)

At the first token of a document h, theta and the v_{t-1} k_{t-1}^T term all start from zero; a given state
belongs to the first document of its row. The derivative of "mod 2 pi" is taken as 1: the angle enters only
through its sine and cosine, which are unaffected by the jump.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)),
R rotation angles (2R <= N), L chunk length, C chunks.
Source: Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TAU = 2 * math.pi


class Mamba3State(NamedTuple):
    """State carried from one token to the next; computed in fp32 (fp64 for fp64 inputs)."""

    theta: Tensor  # (B,H,R) accumulated angle, radians in [0, 2 pi)
    h: Tensor  # (B,H,P,N)
    k_prev: Tensor  # (B,H,N) the last key, biased and rotated
    v_prev: Tensor  # (B,H,P)


def mamba3_siso_step(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, state: Mamba3State,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """Compute one token: the definition, and the decode path.

    q and k (B,G,N), v and z (B,H,P), adt, dt and trap (B,H), biases (H,N), angles (B,H,R), D (H,)
    -> y (B,H,P) in v.dtype, new state. The caller zeroes the state where a new document begins.
    """
    acc, H = torch.promote_types(v.dtype, torch.float32), v.shape[1]
    value, adt, dt, trap, angles, D, z = (t.to(acc) for t in (v, adt, dt, trap, angles, D, z))
    theta, h, k_prev, v_prev = (t.to(acc) for t in state)
    theta = torch.remainder(theta + math.pi * torch.tanh(angles) * dt.unsqueeze(-1), TAU)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = _rotate(_per_head(q.to(acc), H, dim=1) + q_bias.to(acc), cos, sin)
    key = _rotate(_per_head(k.to(acc), H, dim=1) + k_bias.to(acc), cos, sin)
    alpha, lam = torch.exp(adt), torch.sigmoid(trap)
    h = (
        alpha[..., None, None] * h
        + ((1 - lam) * dt * alpha)[..., None, None] * v_prev.unsqueeze(-1) * k_prev.unsqueeze(-2)
        + (lam * dt)[..., None, None] * value.unsqueeze(-1) * key.unsqueeze(-2)
    )
    y = ((h @ query.unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * value) * F.silu(z)
    return y.to(v.dtype), Mamba3State(theta, h, key, value)


def mamba3_siso_recurrent(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor, state: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """Apply the step token by token; arguments and results as for `mamba3_siso_reference`."""
    keep = ~_document_starts(doc_ids)
    state = zero_state(v, q, angles) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = Mamba3State(*(s * keep[:, t].view(-1, *[1] * (s.dim() - 1)) for s in state))
        now = (s[:, t] for s in (q, k, v, adt, dt, trap))
        y, state = mamba3_siso_step(*now, q_bias, k_bias, angles[:, t], D, z[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def mamba3_siso_reference(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor, state: Mamba3State | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """The parallel form, by chunks: a masked quadratic product inside one, a state carried between them.

    q and k (B,T,G,N), v and z (B,T,H,P), adt, dt and trap (B,T,H), biases (H,N), angles (B,T,H,R), D (H,),
    doc_ids (B,T) integer, state or None for zeros
    -> y (B,T,H,P) in v.dtype, final state in fp32 (fp64 for fp64 v).
    """
    state = zero_state(v, q, angles) if state is None else state
    c = _coefficients(q, k, v, adt, dt, trap, q_bias, k_bias, angles, doc_ids, state.theta)
    s = _chunked(c, adt, state, chunk_size)
    entering, h = _carry(s)
    ungated = _scan(s, entering, v.shape[1]) + D.to(c.dt.dtype)[:, None] * c.value
    y = ungated * F.silu(z.to(c.dt.dtype))
    return y.to(v.dtype), Mamba3State(torch.remainder(c.theta[:, -1], TAU), h, c.key[:, -1], c.value[:, -1])


def mamba3_siso_backward_reference(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor, state: Mamba3State, chunk_size: int,
    dy: Tensor, dstate: Mamba3State,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, theta, h, k_prev, v_prev).

    dy (B,T,H,P) and dstate are the gradients of the two results. Only the inputs are saved by the forward.
    """
    T, G = v.shape[1], q.shape[2]
    c = _coefficients(q, k, v, adt, dt, trap, q_bias, k_bias, angles, doc_ids, state.theta)
    s = _chunked(c, adt, state, chunk_size)
    acc = c.dt.dtype
    _, _, k_prev, v_prev = (t.to(acc) for t in state)
    dtheta_final, dh_final, dk_final, dv_final = (t.to(acc) for t in dstate)
    entering, _ = _carry(s)

    # y = (scan + D value) silu(z)
    skip, opened, dy = D.to(acc)[:, None], z.to(acc), dy.to(acc)
    gate = torch.sigmoid(opened)
    dungated = dy * opened * gate
    dz = dy * (_scan(s, entering, T) + skip * c.value) * gate * (1 + opened * (1 - gate))
    dD = (dungated * c.value).sum((0, 1, 3))

    g = _scan_backward(s, entering, dungated, dh_final)
    dquery, dkey = g.query, g.key
    dvalue = g.value + c.scale.unsqueeze(-1) * g.weighted + skip * dungated
    dkey[:, -1] += dk_final
    dvalue[:, -1] += dv_final

    # scale_t = gamma_t + beta_{t+1} within a document; the first beta weighs the given v_prev k_prev^T
    dscale = (g.weighted * c.value).sum(-1)
    dgamma = g.gamma + dscale
    dbeta = F.pad(dscale[:, :-1], (0, 0, 1, 0)).masked_fill(c.starts, 0)
    lifted = (g.initial @ k_prev.unsqueeze(-1)).squeeze(-1)
    dbeta[:, 0] += (lifted * v_prev).sum(-1)
    first = c.beta[:, 0].unsqueeze(-1)
    dk_prev = first * (g.initial.mT @ v_prev.unsqueeze(-1)).squeeze(-1)
    dtrap = (dgamma - dbeta) * c.dt * c.lam * (1 - c.lam)

    # query and key are rotated by theta, a running sum of pi tanh(angle) dt within a document
    R = angles.shape[3]
    dtheta = _angle_gradient(c.query, dquery, R) + _angle_gradient(c.key, dkey, R)
    dtheta[:, -1] += dtheta_final
    dturn = math.pi * _segment_sums(dtheta.flip(1), c.segment.flip(1)).flip(1)
    dangles = dturn * c.dt.unsqueeze(-1) * (1 - c.tanh.square())
    ddt = dgamma * c.lam + dbeta * (1 - c.lam) + (dturn * c.tanh).sum(-1)
    dtheta_given = dtheta.masked_fill(c.segment[..., None, None] > 0, 0).sum(1)
    dquery, dkey = _rotate(dquery, c.cos, -c.sin), _rotate(dkey, c.cos, -c.sin)
    dq, dk = (d.unflatten(2, (G, -1)).sum(3) for d in (dquery, dkey))

    grads = (
        dq, dk, dvalue, g.log_decay, ddt, dtrap, dquery.sum((0, 1)), dkey.sum((0, 1)), dangles, dD, dz,
        dtheta_given, g.initial, dk_prev, first * lifted,
    )  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, *state)
    return tuple(grad.to(i.dtype) for grad, i in zip(grads, inputs))


class _Coefficients(NamedTuple):
    """Per-token quantities, (B,T,H,...) in the accumulation dtype."""

    starts: Tensor  # (B,T,1) bool: a document begins here, and the carried state ends
    segment: Tensor  # (B,T) number of documents begun so far in the row
    dt: Tensor
    lam: Tensor  # sigmoid(trap)
    beta: Tensor  # (1 - lam) dt: weight of the previous token
    gamma: Tensor  # lam dt: weight of the token itself
    scale: Tensor  # gamma_t + beta_{t+1}: weight of token t for every later token of its document
    tanh: Tensor  # (B,T,H,R)
    theta: Tensor  # (B,T,H,R) in [-pi, pi]
    cos: Tensor
    sin: Tensor
    query: Tensor  # (B,T,H,N) biased and rotated
    key: Tensor  # (B,T,H,N)
    value: Tensor  # (B,T,H,P)


def _coefficients(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, doc_ids: Tensor, theta: Tensor,
) -> _Coefficients:  # fmt: skip
    acc, H = torch.promote_types(v.dtype, torch.float32), v.shape[2]
    starts = _document_starts(doc_ids)
    segment = starts.cumsum(1)
    starts = starts.unsqueeze(-1)
    value, dt, lam, tanh = v.to(acc), dt.to(acc), torch.sigmoid(trap.to(acc)), torch.tanh(angles.to(acc))
    beta, gamma = (1 - lam) * dt, lam * dt
    scale = gamma + F.pad(beta.masked_fill(starts, 0)[:, 1:], (0, 0, 0, 1))
    # In turns, not radians: removing whole turns is then exact, and no error of a rounded 2 pi accumulates.
    turns = _segment_sums(tanh * dt.unsqueeze(-1) / 2, segment, wrap=True)
    turns = turns + theta.to(acc).unsqueeze(1) / TAU * (segment == 0)[..., None, None]
    theta = TAU * (turns - torch.round(turns))
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = _rotate(_per_head(q.to(acc), H, dim=2) + q_bias.to(acc), cos, sin)
    key = _rotate(_per_head(k.to(acc), H, dim=2) + k_bias.to(acc), cos, sin)
    return _Coefficients(
        starts, segment, dt, lam, beta, gamma, scale, tanh, theta, cos, sin, query, key, value
    )


class _Chunked(NamedTuple):
    """Operands of the scan, split into chunks."""

    length: int  # L
    query: Tensor  # (B,H,C,L,N)
    key: Tensor  # (B,H,C,L,N)
    value: Tensor  # (B,H,C,L,P)
    weighted: Tensor  # (B,H,C,L,P) scale v
    gamma: Tensor  # (B,H,C,L,1)
    inside: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    since: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    scores: Tensor  # (B,H,C,L,L) query_t . key_s
    initial: Tensor  # (B,H,P,N) given h, including the given v_prev k_prev^T


def _chunked(c: _Coefficients, adt: Tensor, state: Mamba3State, chunk_size: int) -> _Chunked:
    acc, L = c.dt.dtype, min(chunk_size, c.dt.shape[1])
    _, h, k_prev, v_prev = (t.to(acc) for t in state)
    initial = h + c.beta[:, 0, :, None, None] * v_prev.unsqueeze(-1) * k_prev.unsqueeze(-2)
    inside, since = _decays(adt.to(acc).masked_fill(c.starts, float("-inf")), L)
    query, key, value = _chunks(c.query, L), _chunks(c.key, L), _chunks(c.value, L)
    gamma, scale = _chunks(c.gamma, L).unsqueeze(-1), _chunks(c.scale, L).unsqueeze(-1)
    return _Chunked(L, query, key, value, scale * value, gamma, inside, since, query @ key.mT, initial)


def _scan(s: _Chunked, entering: Tensor, T: int) -> Tensor:
    """h_t q_t for each token (B,T,H,P).

    The weight of a token is gamma for itself and scale for later ones. Each is applied separately: subtracting beta
    on the diagonal would cancel, and lose all digits if lam is small.
    """
    itself = s.gamma * s.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * s.value
    earlier = (s.scores * s.inside).tril(-1) @ s.weighted
    return _tokens(earlier + itself + s.since.unsqueeze(-1) * (s.query @ entering.mT), T)


def _carry(s: _Chunked) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and h after the last token (B,H,P,N).

    An entering state already includes the beta of the chunk's first token; nothing follows the last token.
    """
    added = (s.inside[..., -1, :].unsqueeze(-1) * s.weighted).mT @ s.key
    state, entering = s.initial, []
    for c in range(added.shape[2]):
        entering.append(state)
        state = s.since[:, :, c, -1, None, None] * state + added[:, :, c]
    return torch.stack(entering, 2), state


class _ScanGradients(NamedTuple):
    query: Tensor  # (B,T,H,N)
    key: Tensor  # (B,T,H,N)
    value: Tensor  # (B,T,H,P) by the diagonal term alone
    weighted: Tensor  # (B,T,H,P)
    gamma: Tensor  # (B,T,H) by the diagonal term alone
    log_decay: Tensor  # (B,T,H)
    initial: Tensor  # (B,H,P,N)


def _scan_backward(s: _Chunked, entering: Tensor, dscan: Tensor, dfinal: Tensor) -> _ScanGradients:
    T = dscan.shape[1]
    dy = _chunks(dscan, s.length)
    since, leaving = s.since.unsqueeze(-1), s.inside[..., -1, :].unsqueeze(-1)

    # The diagonal term gamma (query . key) value
    along = (dy * s.value).sum(-1, keepdim=True)
    itself = s.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dvalue, dgamma, ditself = s.gamma * itself * dy, along * itself, along * s.gamma

    # (scores * inside, strictly below the diagonal) weighted, and since * (query entering^T)
    mixed = (s.scores * s.inside).tril(-1)
    dmixed = (dy @ s.weighted.mT).tril(-1)
    dscores = dmixed * s.inside
    dweighted = mixed.mT @ dy
    dquery = dscores @ s.key + since * (dy @ entering) + ditself * s.key
    dkey = dscores.mT @ s.query + ditself * s.query
    dlog_inside = dmixed * mixed
    dlog_since = (since * (dy * (s.query @ entering.mT))).sum(-1)
    dentering = (since * dy).mT @ s.query

    # The carry, backward: h' = since_end h + (leaving * weighted)^T key
    dstate, dadded = dfinal, []
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

    dlog = _log_decay_gradient(dlog_inside, dlog_since)
    found = (_tokens(d, T) for d in (dquery, dkey, dvalue, dweighted, dgamma.squeeze(-1), dlog))
    return _ScanGradients(*found, dstate)


def _decays(log_decay: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """(B,T,H) log decay a, -inf where a document begins -> `inside` and `since` of `_Chunked`.

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


def _segment_sums(x: Tensor, segment: Tensor, wrap: bool = False) -> Tensor:
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R adjacent pairs of x (...,H,N) by the angles (...,H,R); leave the rest unchanged."""
    R = cos.shape[-1]
    even, odd = x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((turned, x[..., 2 * R :]), -1)


def _angle_gradient(rotated: Tensor, grad: Tensor, R: int) -> Tensor:
    """Gradient of the angles (...,H,R) from a rotated vector and its gradient, both (...,H,N)."""
    even, odd = rotated[..., : 2 * R : 2], rotated[..., 1 : 2 * R : 2]
    return even * grad[..., 1 : 2 * R : 2] - odd * grad[..., : 2 * R : 2]


def _per_head(x: Tensor, H: int, dim: int) -> Tensor:
    """Groups -> heads along `dim`."""
    return x.repeat_interleave(H // x.shape[dim], dim)


def _document_starts(doc_ids: Tensor) -> Tensor:
    """(B,T) bool: the document changes at this token. Token 0 continues the given state."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0))


def zero_state(v: Tensor, q: Tensor, angles: Tensor) -> Mamba3State:
    """The state before any token, for v (B,T,H,P), q (B,T,G,N), angles (B,T,H,R)."""
    acc, N, R = torch.promote_types(v.dtype, torch.float32), q.shape[3], angles.shape[3]
    B, _, H, P = v.shape
    shapes = ((B, H, R), (B, H, P, N), (B, H, N), (B, H, P))
    return Mamba3State(*(v.new_zeros(shape, dtype=acc) for shape in shapes))


def _chunks(t: Tensor, L: int) -> Tensor:
    """(B,T,H,...) -> (B,H,C,L,...), zero-padded at the end: a pad token neither decays nor adds."""
    pad = -t.shape[1] % L
    if pad:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad))
    return t.unflatten(1, (-1, L)).movedim(3, 1)


def _tokens(t: Tensor, T: int) -> Tensor:
    """(B,H,C,L,...) -> (B,T,H,...), without the padding."""
    return t.movedim(1, 3).flatten(1, 2)[:, :T]
