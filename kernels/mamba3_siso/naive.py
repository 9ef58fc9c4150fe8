"""The Mamba-3 single-input single-output scan, as defined: token by token.

With alpha = exp(adt), lam = sigmoid(trap), theta_t = (theta_{t-1} + pi tanh(angle_t) dt_t) mod 2 pi, and the
first R adjacent pairs of state dims of (q + q_bias) and (k + k_bias) rotated by theta_t:

    h_t = alpha_t h_{t-1} + (1 - lam_t) dt_t alpha_t v_{t-1} k_{t-1}^T + lam_t dt_t v_t k_t^T
    y_t = (h_t q_t + D v_t) silu(z_t)

At the first token of a document h, theta and the v_{t-1} k_{t-1}^T term all start from zero; a given state
belongs to the first document of its row. The derivative of "mod 2 pi" is taken as 1: the angle enters only
through its sine and cosine, which are unaffected by the jump.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)),
R rotation angles (2R <= N).
Source: Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._scan import TAU, document_starts, rotate_pairs


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
    query = rotate_pairs(per_head(q.to(acc), H, dim=1) + q_bias.to(acc), cos, sin)
    key = rotate_pairs(per_head(k.to(acc), H, dim=1) + k_bias.to(acc), cos, sin)
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
    """Apply the step token by token; arguments and results as for `mamba3_siso_eager`."""
    keep = ~document_starts(doc_ids)
    state = zero_state(v, q, angles) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = Mamba3State(*(s * keep[:, t].view(-1, *[1] * (s.dim() - 1)) for s in state))
        now = (s[:, t] for s in (q, k, v, adt, dt, trap))
        y, state = mamba3_siso_step(*now, q_bias, k_bias, angles[:, t], D, z[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def per_head(x: Tensor, H: int, dim: int) -> Tensor:
    """Groups -> heads along `dim`."""
    return x.repeat_interleave(H // x.shape[dim], dim)


def zero_state(v: Tensor, q: Tensor, angles: Tensor) -> Mamba3State:
    """The state before any token, for v (B,T,H,P), q (B,T,G,N), angles (B,T,H,R)."""
    acc, N, R = torch.promote_types(v.dtype, torch.float32), q.shape[3], angles.shape[3]
    B, _, H, P = v.shape
    shapes = ((B, H, R), (B, H, P, N), (B, H, N), (B, H, P))
    return Mamba3State(*(v.new_zeros(shape, dtype=acc) for shape in shapes))
