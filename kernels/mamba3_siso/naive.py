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

from kernels._scan import TAU, rotate_pairs, token_by_token, zeros


class Mamba3Inputs(NamedTuple):
    """The tensors of one call. A step takes them without the axis T, and no doc_ids."""

    fixed = ("q_bias", "k_bias", "D")  # without an axis of tokens

    q: Tensor  # (B,T,G,N) normalised
    k: Tensor  # (B,T,G,N) normalised
    v: Tensor  # (B,T,H,P)
    adt: Tensor  # (B,T,H) A dt, negative
    dt: Tensor  # (B,T,H) after softplus
    trap: Tensor  # (B,T,H) before the sigmoid
    q_bias: Tensor  # (H,N)
    k_bias: Tensor  # (H,N)
    angles: Tensor  # (B,T,H,R) before the tanh
    D: Tensor  # (H,)
    z: Tensor  # (B,T,H,P)
    doc_ids: Tensor | None = None  # (B,T) int32: the state is zeroed where the id changes


class Mamba3State(NamedTuple):
    """State carried from one token to the next; computed in fp32 (fp64 for fp64 inputs)."""

    theta: Tensor  # (B,H,R) accumulated angle, radians in [0, 2 pi)
    h: Tensor  # (B,H,P,N)
    k_prev: Tensor  # (B,H,N) the last key, biased and rotated
    v_prev: Tensor  # (B,H,P)


def mamba3_siso_step(i: Mamba3Inputs, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
    """Compute one token: the definition, and the decode path.

    Returns y (B,H,P) in v.dtype and the new state. The caller zeroes the state where a new document begins.
    """
    acc, H = torch.promote_types(i.v.dtype, torch.float32), i.v.shape[1]
    value, adt, dt, trap, angles, D, z = (t.to(acc) for t in (i.v, i.adt, i.dt, i.trap, i.angles, i.D, i.z))
    theta, h, k_prev, v_prev = (t.to(acc) for t in state)
    theta = torch.remainder(theta + math.pi * torch.tanh(angles) * dt.unsqueeze(-1), TAU)
    cos, sin = torch.cos(theta), torch.sin(theta)
    query = rotate_pairs(per_head(i.q.to(acc), H, dim=1) + i.q_bias.to(acc), cos, sin)
    key = rotate_pairs(per_head(i.k.to(acc), H, dim=1) + i.k_bias.to(acc), cos, sin)
    alpha, lam = torch.exp(adt), torch.sigmoid(trap)
    h = (
        alpha[..., None, None] * h
        + ((1 - lam) * dt * alpha)[..., None, None] * v_prev.unsqueeze(-1) * k_prev.unsqueeze(-2)
        + (lam * dt)[..., None, None] * value.unsqueeze(-1) * key.unsqueeze(-2)
    )
    y = ((h @ query.unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * value) * F.silu(z)
    return y.to(i.v.dtype), Mamba3State(theta, h, key, value)


def mamba3_siso_recurrent(i: Mamba3Inputs, state: Mamba3State | None = None) -> tuple[Tensor, Mamba3State]:
    """Apply the step token by token; arguments and results as for `mamba3_siso_eager`."""
    return token_by_token(mamba3_siso_step, i, zero_state(i) if state is None else state)


def per_head(x: Tensor, H: int, dim: int) -> Tensor:
    """Groups -> heads along `dim`."""
    return x.repeat_interleave(H // x.shape[dim], dim)


def zero_state(i: Mamba3Inputs) -> Mamba3State:
    """The state before any token."""
    (B, _, H, P), N, R = i.v.shape, i.q.shape[3], i.angles.shape[3]
    return Mamba3State(*zeros(i.v, (B, H, R), (B, H, P, N), (B, H, N), (B, H, P)))
