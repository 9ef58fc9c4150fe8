"""The Mamba-3 multi-input multi-output scan in plain torch by chunks, with its gradient. naive.py has the definition.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups (head i reads group i // (H/G)),
A rotation angles (2A <= N). The scan itself is in chunked.py.
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
    rotate_pairs_bwd,
    running_angles,
    segment_sums,
    trapezoid_weights,
)
from kernels.mamba3_mimo.chunked import Chunked, carry, chunked, scan, scan_backward
from kernels.mamba3_mimo.naive import Mamba3MimoInputs, Mamba3MimoState, per_head, rotate, zero_state


def mamba3_mimo_eager(
    i: Mamba3MimoInputs, state: Mamba3MimoState | None = None, chunk_size: int = 16
) -> tuple[Tensor, Mamba3MimoState]:
    """The parallel form, by chunks: a masked quadratic product of rows inside one, a state carried between them.

    Returns y (B,T,H,P) in v.dtype, final state in fp32 (fp64 for fp64 v). state None is zeros.
    """
    state = zero_state(i) if state is None else state
    c = _coefficients(i, state.theta)
    acc = c.dt.dtype
    s = _chunk(c, i, state, chunk_size)
    states, h = carry(s)
    ungated = scan(s, states, i.v.shape[1]) + i.D.to(acc)[:, None, None] * c.rows
    y = (i.mimo_out.to(acc) * ungated * F.silu(i.mimo_z.to(acc) * i.z.to(acc).unsqueeze(3))).sum(3)
    theta = torch.remainder(c.theta[:, -1], TAU)
    return y.to(i.v.dtype), Mamba3MimoState(theta, h, c.key[:, -1], c.value[:, -1])


def mamba3_mimo_backward_eager(
    i: Mamba3MimoInputs, state: Mamba3MimoState, chunk_size: int, dy: Tensor, dstate: Mamba3MimoState
) -> tuple[Tensor, ...]:
    """Gradients of the floating-point inputs and of the state, in their order.

    dy (B,T,H,P) and dstate are the gradients of the two results. Only the inputs are saved by the forward.
    """
    T, G, A = i.v.shape[1], i.q.shape[3], i.angles.shape[3]
    c = _coefficients(i, state.theta)
    s = _chunk(c, i, state, chunk_size)
    acc = c.dt.dtype
    _, _, k_prev, v_prev = (t.to(acc) for t in state)
    dtheta_final, dh_final, dk_final, dv_final = (t.to(acc) for t in dstate)
    up, up_z, down, z = (t.to(acc) for t in (i.mimo_v, i.mimo_z, i.mimo_out, i.z))
    states, _ = carry(s)

    # y = sum_r down (scan + D rows) silu(up_z z)
    skip, gated, dy = i.D.to(acc)[:, None, None], up_z * z.unsqueeze(3), dy.to(acc).unsqueeze(3)
    ungated, sigmoid = scan(s, states, T) + skip * c.rows, torch.sigmoid(gated)
    dungated = dy * down * gated * sigmoid
    dgated = dy * down * ungated * sigmoid * (1 + gated * (1 - sigmoid))
    ddown = (dy * ungated * gated * sigmoid).sum((0, 1))
    dup_z, dz = (dgated * z.unsqueeze(3)).sum((0, 1)), (dgated * up_z).sum(3)
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
    dquery, dkey = rotate(dquery, c.cos, -c.sin), rotate(dkey, c.cos, -c.sin)
    dq, dk = (d.unflatten(2, (G, -1)).sum(3).transpose(2, 3) for d in (dquery, dkey))

    grads = (
        dq, dk, dvalue, g.log_decay, ddt, dtrap, dquery.sum((0, 1)), dkey.sum((0, 1)), dup, dup_z, ddown,
        dangles, dD, dz, dtheta_given, g.initial, dk_prev, dv_prev,
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
    tanh: Tensor  # (B,T,H,A)
    theta: Tensor  # (B,T,H,A) in [-pi, pi]
    cos: Tensor
    sin: Tensor
    query: Tensor  # (B,T,H,R,N) biased and rotated
    key: Tensor  # (B,T,H,R,N)
    value: Tensor  # (B,T,H,P)
    rows: Tensor  # (B,T,H,R,P) mimo_v value


def _coefficients(i: Mamba3MimoInputs, theta: Tensor) -> _Coefficients:
    acc, H = torch.promote_types(i.v.dtype, torch.float32), i.v.shape[2]
    starts = document_starts(i.doc_ids)
    segment = starts.cumsum(1)
    starts = starts.unsqueeze(-1)
    value, dt, tanh = i.v.to(acc), i.dt.to(acc), torch.tanh(i.angles.to(acc))
    lam, beta, gamma, scale = trapezoid_weights(dt, i.trap.to(acc), starts)
    theta = running_angles(tanh, dt, segment, theta)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = rotate(per_head(i.q.to(acc), H) + i.q_bias.to(acc), cos, sin)
    key = rotate(per_head(i.k.to(acc), H) + i.k_bias.to(acc), cos, sin)
    rows = i.mimo_v.to(acc) * value.unsqueeze(3)
    return _Coefficients(
        starts, segment, dt, lam, beta, gamma, scale, tanh, theta, cos, sin, query, key, value, rows
    )


def _chunk(c: _Coefficients, i: Mamba3MimoInputs, state: Mamba3MimoState, chunk_size: int) -> Chunked:
    acc = c.dt.dtype
    _, h, k_prev, v_prev = (t.to(acc) for t in state)
    before = i.mimo_v.to(acc) * v_prev.unsqueeze(-2)
    initial = h + c.beta[:, 0, :, None, None] * (before.mT @ k_prev)
    log_decay = i.adt.to(acc).masked_fill(c.starts, float("-inf"))
    return chunked(c.query, c.key, c.rows, c.gamma, c.scale, log_decay, initial, chunk_size)
