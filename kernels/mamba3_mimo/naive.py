"""The Mamba-3 multi-input multi-output scan, as defined: token by token.

A token brings R keys and queries to one state. With value_r = mimo_v_r v and alpha, lam and theta as in the
single-input form, alpha = exp(adt), lam = sigmoid(trap), theta_t = (theta_{t-1} + pi tanh(angle_t) dt_t) mod 2 pi,
and the first A adjacent pairs of state dims of (q + q_bias) and (k + k_bias) rotated by theta_t:

    h_t = alpha_t h_{t-1} + sum_r (1 - lam_t) dt_t alpha_t value_{t-1,r} k_{t-1,r}^T + lam_t dt_t value_{t,r} k_{t,r}^T
    y_t = sum_r mimo_out_r (h_t q_{t,r} + D value_{t,r}) silu(mimo_z_r z_t)

At the first token of a document h, theta and the term of token t-1 all start from zero; a given state belongs to
the first document of its row. The derivative of "mod 2 pi" is taken as 1: the angle enters only through its sine
and cosine, which are unaffected by the jump.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups (head i reads group i // (H/G)),
A rotation angles (2A <= N).
Source: Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._scan import TAU, rotate_pairs, token_by_token, zeros


class Mamba3MimoInputs(NamedTuple):
    """The tensors of one call. A step takes them without the axis T, and no doc_ids."""

    fixed = ("q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "D")  # without an axis of tokens

    q: Tensor  # (B,T,R,G,N) normalised
    k: Tensor  # (B,T,R,G,N) normalised
    v: Tensor  # (B,T,H,P)
    adt: Tensor  # (B,T,H) A dt, negative
    dt: Tensor  # (B,T,H) after softplus
    trap: Tensor  # (B,T,H) before the sigmoid
    q_bias: Tensor  # (H,R,N)
    k_bias: Tensor  # (H,R,N)
    mimo_v: Tensor  # (H,R,P) up-projection of v
    mimo_z: Tensor  # (H,R,P) up-projection of z
    mimo_out: Tensor  # (H,R,P) down-projection of the result
    angles: Tensor  # (B,T,H,A) before the tanh; each rotates an adjacent pair of state dims
    D: Tensor  # (H,)
    z: Tensor  # (B,T,H,P)
    doc_ids: Tensor | None = None  # (B,T) int32: the state is zeroed where the id changes


class Mamba3MimoState(NamedTuple):
    """State carried from one token to the next; computed in fp32 (fp64 for fp64 inputs)."""

    theta: Tensor  # (B,H,A) accumulated angle, radians in [0, 2 pi)
    h: Tensor  # (B,H,P,N)
    k_prev: Tensor  # (B,H,R,N) the last keys, biased and rotated
    v_prev: Tensor  # (B,H,P) before mimo_v


def mamba3_mimo_step(i: Mamba3MimoInputs, state: Mamba3MimoState) -> tuple[Tensor, Mamba3MimoState]:
    """Compute one token: the definition, and the decode path.

    Returns y (B,H,P) in v.dtype and the new state. The caller zeroes the state where a new document begins.
    """
    acc, H = torch.promote_types(i.v.dtype, torch.float32), i.v.shape[1]
    value, adt, dt, trap, angles, D, z = (t.to(acc) for t in (i.v, i.adt, i.dt, i.trap, i.angles, i.D, i.z))
    mimo_v, mimo_z, mimo_out = (t.to(acc) for t in (i.mimo_v, i.mimo_z, i.mimo_out))
    theta, h, k_prev, v_prev = (t.to(acc) for t in state)
    theta = torch.remainder(theta + math.pi * torch.tanh(angles) * dt.unsqueeze(-1), TAU)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = rotate(per_head(i.q.to(acc), H) + i.q_bias.to(acc), cos, sin)
    key = rotate(per_head(i.k.to(acc), H) + i.k_bias.to(acc), cos, sin)
    alpha, lam = torch.exp(adt), torch.sigmoid(trap)
    rows, before = mimo_v * value.unsqueeze(-2), mimo_v * v_prev.unsqueeze(-2)  # (B,H,R,P)
    h = (
        alpha[..., None, None] * h
        + ((1 - lam) * dt * alpha)[..., None, None] * (before.mT @ k_prev)
        + (lam * dt)[..., None, None] * (rows.mT @ key)
    )
    ungated = query @ h.mT + D[:, None, None] * rows
    y = (mimo_out * ungated * F.silu(mimo_z * z.unsqueeze(-2))).sum(-2)
    return y.to(i.v.dtype), Mamba3MimoState(theta, h, key, value)


def mamba3_mimo_recurrent(
    i: Mamba3MimoInputs, state: Mamba3MimoState | None = None
) -> tuple[Tensor, Mamba3MimoState]:
    """Apply the step token by token; arguments and results as for `mamba3_mimo_eager`."""
    return token_by_token(mamba3_mimo_step, i, zero_state(i) if state is None else state)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each rank of x (...,H,R,N) by the angles (...,H,A)."""
    return rotate_pairs(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def per_head(x: Tensor, H: int) -> Tensor:
    """(...,R,G,N) -> (...,H,R,N)."""
    x = x.transpose(-3, -2)
    return x.repeat_interleave(H // x.shape[-3], -3)


def zero_state(i: Mamba3MimoInputs) -> Mamba3MimoState:
    """The state before any token."""
    (B, _, H, P), R, N, A = i.v.shape, i.q.shape[2], i.q.shape[4], i.angles.shape[3]
    return Mamba3MimoState(*zeros(i.v, (B, H, A), (B, H, P, N), (B, H, R, N), (B, H, P)))
