"""The Mamba-3 multi-input multi-output scan in plain torch: as a recurrence (the definition) and by chunks.

A token brings R keys and queries to one state. With value_r = mimo_v_r v and alpha, lam and theta as in the
single-input form, alpha = exp(adt), lam = sigmoid(trap), theta_t = (theta_{t-1} + pi tanh(angle_t) dt_t) mod 2 pi,
and the first A adjacent pairs of state dims of (q + q_bias) and (k + k_bias) rotated by theta_t:

    h_t = alpha_t h_{t-1} + sum_r (1 - lam_t) dt_t alpha_t value_{t-1,r} k_{t-1,r}^T + lam_t dt_t value_{t,r} k_{t,r}^T
    y_t = sum_r mimo_out_r (h_t q_{t,r} + D value_{t,r}) silu(mimo_z_r z_t)

At the first token of a document h, theta and the term of token t-1 all start from zero; a given state belongs to
the first document of its row. The derivative of "mod 2 pi" is taken as 1: the angle enters only through its sine
and cosine, which are unaffected by the jump.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups (head i reads group i // (H/G)),
A rotation angles (2A <= N). The scan itself is in chunked.py.
Source: Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._scan import (
    TAU,
    document_starts,
    rotate_pairs,
    rotate_pairs_bwd,
    running_angles,
    segment_sums,
    trapezoid_weights,
)
from kernels.mamba3_mimo.chunked import Chunked, carry, chunked, scan, scan_backward


class Mamba3MimoState(NamedTuple):
    """State carried from one token to the next; computed in fp32 (fp64 for fp64 inputs)."""

    theta: Tensor  # (B,H,A) accumulated angle, radians in [0, 2 pi)
    h: Tensor  # (B,H,P,N)
    k_prev: Tensor  # (B,H,R,N) the last keys, biased and rotated
    v_prev: Tensor  # (B,H,P) before mimo_v


def mamba3_mimo_step(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, state: Mamba3MimoState,
) -> tuple[Tensor, Mamba3MimoState]:  # fmt: skip
    """Compute one token: the definition, and the decode path.

    q and k (B,R,G,N), v and z (B,H,P), adt, dt and trap (B,H), biases (H,R,N), mimo_* (H,R,P), angles (B,H,A),
    D (H,) -> y (B,H,P) in v.dtype, new state. The caller zeroes the state where a new document begins.
    """
    acc, H = torch.promote_types(v.dtype, torch.float32), v.shape[1]
    value, adt, dt, trap, angles, D, z = (t.to(acc) for t in (v, adt, dt, trap, angles, D, z))
    mimo_v, mimo_z, mimo_out = (t.to(acc) for t in (mimo_v, mimo_z, mimo_out))
    theta, h, k_prev, v_prev = (t.to(acc) for t in state)
    theta = torch.remainder(theta + math.pi * torch.tanh(angles) * dt.unsqueeze(-1), TAU)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = _rotate(_per_head(q.to(acc), H) + q_bias.to(acc), cos, sin)
    key = _rotate(_per_head(k.to(acc), H) + k_bias.to(acc), cos, sin)
    alpha, lam = torch.exp(adt), torch.sigmoid(trap)
    rows, before = mimo_v * value.unsqueeze(-2), mimo_v * v_prev.unsqueeze(-2)  # (B,H,R,P)
    h = (
        alpha[..., None, None] * h
        + ((1 - lam) * dt * alpha)[..., None, None] * (before.mT @ k_prev)
        + (lam * dt)[..., None, None] * (rows.mT @ key)
    )
    ungated = query @ h.mT + D[:, None, None] * rows
    y = (mimo_out * ungated * F.silu(mimo_z * z.unsqueeze(-2))).sum(-2)
    return y.to(v.dtype), Mamba3MimoState(theta, h, key, value)


def mamba3_mimo_recurrent(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    state: Mamba3MimoState | None = None,
) -> tuple[Tensor, Mamba3MimoState]:  # fmt: skip
    """Apply the step token by token; arguments and results as for `mamba3_mimo_reference`."""
    keep = ~document_starts(doc_ids)
    state = zero_state(v, q, angles) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = Mamba3MimoState(*(s * keep[:, t].view(-1, *[1] * (s.dim() - 1)) for s in state))
        now, fixed = (s[:, t] for s in (q, k, v, adt, dt, trap)), (q_bias, k_bias, mimo_v, mimo_z, mimo_out)
        y, state = mamba3_mimo_step(*now, *fixed, angles[:, t], D, z[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def mamba3_mimo_reference(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    state: Mamba3MimoState | None = None, chunk_size: int = 16,
) -> tuple[Tensor, Mamba3MimoState]:  # fmt: skip
    """The parallel form, by chunks: a masked quadratic product of rows inside one, a state carried between them.

    q and k (B,T,R,G,N), v and z (B,T,H,P), adt, dt and trap (B,T,H), biases (H,R,N), mimo_* (H,R,P), angles
    (B,T,H,A), D (H,), doc_ids (B,T) integer, state or None for zeros
    -> y (B,T,H,P) in v.dtype, final state in fp32 (fp64 for fp64 v).
    """
    state = zero_state(v, q, angles) if state is None else state
    c = _coefficients(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, angles, doc_ids, state.theta)
    acc = c.dt.dtype
    s = _chunk(c, adt, mimo_v, state, chunk_size)
    states, h = carry(s)
    ungated = scan(s, states, v.shape[1]) + D.to(acc)[:, None, None] * c.rows
    y = (mimo_out.to(acc) * ungated * F.silu(mimo_z.to(acc) * z.to(acc).unsqueeze(3))).sum(3)
    theta = torch.remainder(c.theta[:, -1], TAU)
    return y.to(v.dtype), Mamba3MimoState(theta, h, c.key[:, -1], c.value[:, -1])


def mamba3_mimo_backward_reference(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    state: Mamba3MimoState, chunk_size: int, dy: Tensor, dstate: Mamba3MimoState,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, *state).

    dy (B,T,H,P) and dstate are the gradients of the two results. Only the inputs are saved by the forward.
    """
    T, G, A = v.shape[1], q.shape[3], angles.shape[3]
    c = _coefficients(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, angles, doc_ids, state.theta)
    s = _chunk(c, adt, mimo_v, state, chunk_size)
    acc = c.dt.dtype
    _, _, k_prev, v_prev = (t.to(acc) for t in state)
    dtheta_final, dh_final, dk_final, dv_final = (t.to(acc) for t in dstate)
    up, up_z, down = (t.to(acc) for t in (mimo_v, mimo_z, mimo_out))
    states, _ = carry(s)

    # y = sum_r down (scan + D rows) silu(up_z z)
    skip, gated, dy = D.to(acc)[:, None, None], up_z * z.to(acc).unsqueeze(3), dy.to(acc).unsqueeze(3)
    ungated, sigmoid = scan(s, states, T) + skip * c.rows, torch.sigmoid(gated)
    dungated = dy * down * gated * sigmoid
    dgated = dy * down * ungated * sigmoid * (1 + gated * (1 - sigmoid))
    ddown = (dy * ungated * gated * sigmoid).sum((0, 1))
    dup_z, dz = (dgated * z.to(acc).unsqueeze(3)).sum((0, 1)), (dgated * up_z).sum(3)
    dD = (dungated * c.rows).sum((0, 1, 3, 4))

    g = scan_backward(s, states, dungated, dh_final)
    dquery, dkey, drows = g.query, g.key, g.rows + skip * dungated
    dvalue, dup = (drows * up).sum(3), (drows * c.value.unsqueeze(3)).sum((0, 1))
    dkey[:, -1] += dk_final
    dvalue[:, -1] += dv_final

    # scale_t = gamma_t + beta_{t+1} within a document; the first beta weighs the given keys and value
    dgamma = g.gamma + g.scale
    dbeta = F.pad(g.scale[:, :-1], (0, 0, 1, 0)).masked_fill(c.starts, 0)
    lifted, before = k_prev @ g.initial.mT, up * v_prev.unsqueeze(-2)  # (B,H,R,P)
    dbeta[:, 0] += (lifted * before).sum((-1, -2))
    first = c.beta[:, 0, :, None, None]
    dbefore, dk_prev = first * lifted, first * (before @ g.initial)
    dv_prev, dup = (dbefore * up).sum(-2), dup + (dbefore * v_prev.unsqueeze(-2)).sum(0)
    dtrap = (dgamma - dbeta) * c.dt * c.lam * (1 - c.lam)

    # queries and keys are rotated by theta, a running sum of pi tanh(angle) dt within a document
    dtheta = rotate_pairs_bwd(c.query, dquery, A).sum(-2) + rotate_pairs_bwd(c.key, dkey, A).sum(-2)
    dtheta[:, -1] += dtheta_final
    dturn = math.pi * segment_sums(dtheta.flip(1), c.segment.flip(1)).flip(1)
    dangles = dturn * c.dt.unsqueeze(-1) * (1 - c.tanh.square())
    ddt = dgamma * c.lam + dbeta * (1 - c.lam) + (dturn * c.tanh).sum(-1)
    dtheta_given = dtheta.masked_fill(c.segment[..., None, None] > 0, 0).sum(1)
    dquery, dkey = _rotate(dquery, c.cos, -c.sin), _rotate(dkey, c.cos, -c.sin)
    dq, dk = (d.unflatten(2, (G, -1)).sum(3).transpose(2, 3) for d in (dquery, dkey))

    grads = (
        dq, dk, dvalue, g.log_decay, ddt, dtrap, dquery.sum((0, 1)), dkey.sum((0, 1)), dup, dup_z, ddown,
        dangles, dD, dz, dtheta_given, g.initial, dk_prev, dv_prev,
    )  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, *state)
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
    tanh: Tensor  # (B,T,H,A)
    theta: Tensor  # (B,T,H,A) in [-pi, pi]
    cos: Tensor
    sin: Tensor
    query: Tensor  # (B,T,H,R,N) biased and rotated
    key: Tensor  # (B,T,H,R,N)
    value: Tensor  # (B,T,H,P)
    rows: Tensor  # (B,T,H,R,P) mimo_v value


def _coefficients(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, angles: Tensor, doc_ids: Tensor, theta: Tensor,
) -> _Coefficients:  # fmt: skip
    acc, H = torch.promote_types(v.dtype, torch.float32), v.shape[2]
    starts = document_starts(doc_ids)
    segment = starts.cumsum(1)
    starts = starts.unsqueeze(-1)
    value, dt, tanh = v.to(acc), dt.to(acc), torch.tanh(angles.to(acc))
    lam, beta, gamma, scale = trapezoid_weights(dt, trap.to(acc), starts)
    theta = running_angles(tanh, dt, segment, theta)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = _rotate(_per_head(q.to(acc), H) + q_bias.to(acc), cos, sin)
    key = _rotate(_per_head(k.to(acc), H) + k_bias.to(acc), cos, sin)
    rows = mimo_v.to(acc) * value.unsqueeze(3)
    return _Coefficients(
        starts, segment, dt, lam, beta, gamma, scale, tanh, theta, cos, sin, query, key, value, rows
    )


def _chunk(c: _Coefficients, adt: Tensor, mimo_v: Tensor, state: Mamba3MimoState, chunk_size: int) -> Chunked:
    acc = c.dt.dtype
    _, h, k_prev, v_prev = (t.to(acc) for t in state)
    before = mimo_v.to(acc) * v_prev.unsqueeze(-2)
    initial = h + c.beta[:, 0, :, None, None] * (before.mT @ k_prev)
    log_decay = adt.to(acc).masked_fill(c.starts, float("-inf"))
    return chunked(c.query, c.key, c.rows, c.gamma, c.scale, log_decay, initial, chunk_size)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each rank of x (...,H,R,N) by the angles (...,H,A)."""
    return rotate_pairs(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def _per_head(x: Tensor, H: int) -> Tensor:
    """(...,R,G,N) -> (...,H,R,N)."""
    x = x.transpose(-3, -2)
    return x.repeat_interleave(H // x.shape[-3], -3)


def zero_state(v: Tensor, q: Tensor, angles: Tensor) -> Mamba3MimoState:
    """The state before any token, for v (B,T,H,P), q (B,T,R,G,N), angles (B,T,H,A)."""
    acc, R, N, A = torch.promote_types(v.dtype, torch.float32), q.shape[2], q.shape[4], angles.shape[3]
    B, _, H, P = v.shape
    shapes = ((B, H, A), (B, H, P, N), (B, H, R, N), (B, H, P))
    return Mamba3MimoState(*(v.new_zeros(shape, dtype=acc) for shape in shapes))
