"""The Mamba-3 single-input single-output scan in plain torch by chunks, with its gradient.

naive.py has the definition.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)),
R rotation angles (2R <= N), L chunk length, C chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._scan import (
    TAU,
    chunk_decays,
    chunk_decays_bwd,
    document_starts,
    rotate_pairs,
    rotate_pairs_bwd,
    running_angles,
    segment_sums,
    state_passing,
    state_passing_bwd,
    to_chunks,
    to_tokens,
    trapezoid_weights,
)
from kernels.mamba3_siso.naive import Mamba3Inputs, Mamba3State, per_head, zero_state


def mamba3_siso_eager(
    i: Mamba3Inputs, state: Mamba3State | None = None, chunk_size: int = 64
) -> tuple[Tensor, Mamba3State]:
    """The parallel form, by chunks: a masked quadratic product inside one, a state carried between them.

    Returns y (B,T,H,P) in v.dtype, final state in fp32 (fp64 for fp64 v). state None is zeros.
    """
    state = zero_state(i) if state is None else state
    c = _coefficients(i, state.theta)
    s = _chunked(c, i.adt, state, chunk_size)
    states, h = _carry(s)
    ungated = _scan(s, states, i.v.shape[1]) + i.D.to(c.dt.dtype)[:, None] * c.value
    y = ungated * F.silu(i.z.to(c.dt.dtype))
    return y.to(i.v.dtype), Mamba3State(torch.remainder(c.theta[:, -1], TAU), h, c.key[:, -1], c.value[:, -1])


def mamba3_siso_backward_eager(
    i: Mamba3Inputs, state: Mamba3State, chunk_size: int, dy: Tensor, dstate: Mamba3State
) -> tuple[Tensor, ...]:
    """Gradients of the floating-point inputs and of the state, in their order.

    dy (B,T,H,P) and dstate are the gradients of the two results. Only the inputs are saved by the forward.
    """
    T, G = i.v.shape[1], i.q.shape[2]
    c = _coefficients(i, state.theta)
    s = _chunked(c, i.adt, state, chunk_size)
    acc = c.dt.dtype
    _, _, k_prev, v_prev = (t.to(acc) for t in state)
    dtheta_final, dh_final, dk_final, dv_final = (t.to(acc) for t in dstate)
    states, _ = _carry(s)

    # y = (scan + D value) silu(z)
    skip, pre_gate, dy = i.D.to(acc)[:, None], i.z.to(acc), dy.to(acc)
    gate = torch.sigmoid(pre_gate)
    dungated = dy * pre_gate * gate
    dz = dy * (_scan(s, states, T) + skip * c.value) * gate * (1 + pre_gate * (1 - gate))
    dD = (dungated * c.value).sum((0, 1, 3))

    g = _scan_backward(s, states, dungated, dh_final)
    dquery, dkey = g.query, g.key
    dvalue = g.value + c.scale.unsqueeze(-1) * g.scaled + skip * dungated
    dkey[:, -1] += dk_final
    dvalue[:, -1] += dv_final

    # scale_t = gamma_t + beta_{t+1} within a document; the first beta weighs the given v_prev k_prev^T
    dscale = (g.scaled * c.value).sum(-1)
    dgamma = g.gamma + dscale
    dbeta = F.pad(dscale[:, :-1], (0, 0, 1, 0)).masked_fill(c.starts, 0)
    lifted = (g.initial @ k_prev.unsqueeze(-1)).squeeze(-1)
    dbeta[:, 0] += (lifted * v_prev).sum(-1)
    first = c.beta[:, 0].unsqueeze(-1)
    dk_prev = first * (g.initial.mT @ v_prev.unsqueeze(-1)).squeeze(-1)
    dtrap = (dgamma - dbeta) * c.dt * c.lam * (1 - c.lam)

    # query and key are rotated by theta, a running sum of pi tanh(angle) dt within a document
    R = i.angles.shape[3]
    dtheta = rotate_pairs_bwd(c.query, dquery, R) + rotate_pairs_bwd(c.key, dkey, R)
    dtheta[:, -1] += dtheta_final
    dturn = math.pi * segment_sums(dtheta.flip(1), c.segment.flip(1)).flip(1)
    dangles = dturn * c.dt.unsqueeze(-1) * (1 - c.tanh.square())
    ddt = dgamma * c.lam + dbeta * (1 - c.lam) + (dturn * c.tanh).sum(-1)
    dtheta_given = dtheta.masked_fill(c.segment[..., None, None] > 0, 0).sum(1)
    dquery, dkey = rotate_pairs(dquery, c.cos, -c.sin), rotate_pairs(dkey, c.cos, -c.sin)
    dq, dk = (d.unflatten(2, (G, -1)).sum(3) for d in (dquery, dkey))

    grads = (
        dq, dk, dvalue, g.log_decay, ddt, dtrap, dquery.sum((0, 1)), dkey.sum((0, 1)), dangles, dD, dz,
        dtheta_given, g.initial, dk_prev, first * lifted,
    )  # fmt: skip
    return tuple(grad.to(t.dtype) for grad, t in zip(grads, (*i[:-1], *state)))


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


def _coefficients(i: Mamba3Inputs, theta: Tensor) -> _Coefficients:
    acc, H = torch.promote_types(i.v.dtype, torch.float32), i.v.shape[2]
    starts = document_starts(i.doc_ids)
    segment = starts.cumsum(1)
    starts = starts.unsqueeze(-1)
    value, dt, tanh = i.v.to(acc), i.dt.to(acc), torch.tanh(i.angles.to(acc))
    lam, beta, gamma, scale = trapezoid_weights(dt, i.trap.to(acc), starts)
    theta = running_angles(tanh, dt, segment, theta)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = rotate_pairs(per_head(i.q.to(acc), H, dim=2) + i.q_bias.to(acc), cos, sin)
    key = rotate_pairs(per_head(i.k.to(acc), H, dim=2) + i.k_bias.to(acc), cos, sin)
    return _Coefficients(
        starts, segment, dt, lam, beta, gamma, scale, tanh, theta, cos, sin, query, key, value
    )


class _Chunked(NamedTuple):
    """Operands of the scan, split into chunks."""

    length: int  # L
    query: Tensor  # (B,H,C,L,N)
    key: Tensor  # (B,H,C,L,N)
    value: Tensor  # (B,H,C,L,P)
    scaled: Tensor  # (B,H,C,L,P) scale v
    gamma: Tensor  # (B,H,C,L,1)
    decay: Tensor  # (B,H,C,L,L) decay from after token s to token t; 0 for s > t and across documents
    state_decay: Tensor  # (B,H,C,L) decay of the state that enters the chunk, up to and including token t
    scores: Tensor  # (B,H,C,L,L) query_t . key_s
    initial: Tensor  # (B,H,P,N) given h, including the given v_prev k_prev^T


def _chunked(c: _Coefficients, adt: Tensor, state: Mamba3State, chunk_size: int) -> _Chunked:
    acc, L = c.dt.dtype, min(chunk_size, c.dt.shape[1])
    _, h, k_prev, v_prev = (t.to(acc) for t in state)
    initial = h + c.beta[:, 0, :, None, None] * v_prev.unsqueeze(-1) * k_prev.unsqueeze(-2)
    decay, state_decay = chunk_decays(adt.to(acc).masked_fill(c.starts, float("-inf")), L)
    query, key, value = to_chunks(c.query, L), to_chunks(c.key, L), to_chunks(c.value, L)
    gamma, scale = to_chunks(c.gamma, L).unsqueeze(-1), to_chunks(c.scale, L).unsqueeze(-1)
    return _Chunked(L, query, key, value, scale * value, gamma, decay, state_decay, query @ key.mT, initial)


def _scan(s: _Chunked, states: Tensor, T: int) -> Tensor:
    """h_t q_t for each token (B,T,H,P).

    The weight of a token is gamma for itself and scale for later ones. Each is applied separately: subtracting beta
    on the diagonal would cancel, and lose all digits if lam is small.
    """
    diagonal = s.gamma * s.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * s.value
    off_diagonal = (s.scores * s.decay).tril(-1) @ s.scaled
    return to_tokens(off_diagonal + diagonal + s.state_decay.unsqueeze(-1) * (s.query @ states.mT), T)


def _carry(s: _Chunked) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk (B,H,C,P,N), and h after the last token (B,H,P,N).

    An entering state already includes the beta of the chunk's first token; nothing follows the last token.
    """
    chunk_state = (s.decay[..., -1, :].unsqueeze(-1) * s.scaled).mT @ s.key
    return state_passing(chunk_state, s.state_decay, s.initial)


class _ScanGradients(NamedTuple):
    query: Tensor  # (B,T,H,N)
    key: Tensor  # (B,T,H,N)
    value: Tensor  # (B,T,H,P) by the diagonal term alone
    scaled: Tensor  # (B,T,H,P)
    gamma: Tensor  # (B,T,H) by the diagonal term alone
    log_decay: Tensor  # (B,T,H)
    initial: Tensor  # (B,H,P,N)


def _scan_backward(s: _Chunked, states: Tensor, dscan: Tensor, dfinal: Tensor) -> _ScanGradients:
    T = dscan.shape[1]
    dy = to_chunks(dscan, s.length)
    state_decay, end_decay = s.state_decay.unsqueeze(-1), s.decay[..., -1, :].unsqueeze(-1)

    # The diagonal term gamma (query . key) value
    dy_value = (dy * s.value).sum(-1, keepdim=True)
    diagonal = s.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dvalue, dgamma, ddiagonal = s.gamma * diagonal * dy, dy_value * diagonal, dy_value * s.gamma

    # (scores * decay, strictly below the diagonal) scaled, and state_decay * (query states^T)
    mixed = (s.scores * s.decay).tril(-1)
    dmixed = (dy @ s.scaled.mT).tril(-1)
    dscores = dmixed * s.decay
    dscaled = mixed.mT @ dy
    dquery = dscores @ s.key + state_decay * (dy @ states) + ddiagonal * s.key
    dkey = dscores.mT @ s.query + ddiagonal * s.query
    dlog_decay = dmixed * mixed
    dlog_state_decay = (state_decay * (dy * (s.query @ states.mT))).sum(-1)
    dstates = (state_decay * dy).mT @ s.query

    # state_passing, backward: h' = state_decay_end h + (end_decay * scaled)^T key
    dchunk_state, dstate = state_passing_bwd(dstates, dfinal, states, s.state_decay, dlog_state_decay)
    dwritten = s.key @ dchunk_state.mT
    dscaled = dscaled + end_decay * dwritten
    dkey = dkey + (end_decay * s.scaled) @ dchunk_state
    dlog_decay[..., -1, :] += (end_decay * s.scaled * dwritten).sum(-1)

    dlog = chunk_decays_bwd(dlog_decay, dlog_state_decay)
    found = (to_tokens(d, T) for d in (dquery, dkey, dvalue, dscaled, dgamma.squeeze(-1), dlog))
    return _ScanGradients(*found, dstate)
