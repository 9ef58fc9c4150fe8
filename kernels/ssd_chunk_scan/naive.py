"""SSD, the scan of Mamba-2, as defined: token by token.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

h is zero before the first token of a document; the initial state belongs to the first document of its row.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)).
Source: Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels._scan import token_by_token, zeros


class SsdInputs(NamedTuple):
    """The tensors of one call. A step takes them without the axis T, and no doc_ids."""

    fixed = ("A", "D")  # without an axis of tokens

    x: Tensor  # (B,T,H,P)
    dt: Tensor  # (B,T,H) after softplus
    A: Tensor  # (H,) negative
    Bmat: Tensor  # (B,T,G,N)
    Cmat: Tensor  # (B,T,G,N)
    D: Tensor  # (H,)
    doc_ids: Tensor | None = None  # (B,T) int32: the state is zeroed where the id changes


def ssd_chunk_scan_step(i: SsdInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token: the definition, and the decode path. state (B,H,P,N).

    Returns y (B,H,P) in x.dtype, new state (B,H,P,N) in fp32 (fp64 for fp64 x). The caller zeroes the state where a
    new document begins.
    """
    acc = torch.promote_types(i.x.dtype, torch.float32)
    H = i.x.shape[1]
    value, dt, A, D = (t.to(acc) for t in (i.x, i.dt, i.A, i.D))
    key, query = (m.to(acc).repeat_interleave(H // m.shape[1], 1) for m in (i.Bmat, i.Cmat))
    decay = torch.exp(A * dt)[..., None, None]
    state = decay * state.to(acc) + (dt.unsqueeze(-1) * value).unsqueeze(-1) * key.unsqueeze(-2)
    y = (state @ query.unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * value
    return y.to(i.x.dtype), state


def ssd_chunk_scan_recurrent(i: SsdInputs, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the step token by token; arguments and results as for `ssd_chunk_scan_eager`."""
    return token_by_token(ssd_chunk_scan_step, i, first_state(i, initial_state))


def first_state(i: SsdInputs, state: Tensor | None) -> Tensor:
    (B, _, H, P), N = i.x.shape, i.Bmat.shape[3]
    (zero,) = zeros(i.x, (B, H, P, N))
    return zero if state is None else state.to(zero.dtype)
