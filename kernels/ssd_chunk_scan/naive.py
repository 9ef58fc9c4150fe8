"""SSD, the scan of Mamba-2,, as defined: token by token.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

h is zero before the first token of a document; the initial state belongs to the first document of its row.

B batch, T tokens, H heads, P head dim, N state dim, G groups (head i reads group i // (H/G)).
Source: Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._scan import document_starts


def ssd_chunk_scan_step(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token: the definition, and the decode path.

    x (B,H,P), dt (B,H) after softplus, A (H,) negative, Bmat and Cmat (B,G,N), D (H,), state (B,H,P,N)
    -> y (B,H,P) in x.dtype, new state (B,H,P,N) in fp32 (fp64 for fp64 x). The caller zeroes the state
    where a new document begins.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    H = x.shape[1]
    value, dt, A, D = x.to(acc), dt.to(acc), A.to(acc), D.to(acc)
    key, query = (m.to(acc).repeat_interleave(H // m.shape[1], 1) for m in (Bmat, Cmat))
    decay = torch.exp(A * dt)[..., None, None]
    state = decay * state.to(acc) + (dt.unsqueeze(-1) * value).unsqueeze(-1) * key.unsqueeze(-2)
    y = (state @ query.unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * value
    return y.to(x.dtype), state


def ssd_chunk_scan_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply the step token by token; arguments and results as for `ssd_chunk_scan_eager`."""
    state = first_state(x, Bmat, initial_state)
    keep = ~document_starts(doc_ids)
    outputs = []
    for t in range(x.shape[1]):
        state = state * keep[:, t, None, None, None]
        y, state = ssd_chunk_scan_step(x[:, t], dt[:, t], A, Bmat[:, t], Cmat[:, t], D, state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def first_state(x: Tensor, Bmat: Tensor, state: Tensor | None) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    if state is not None:
        return state.to(acc)
    return x.new_zeros((x.shape[0], x.shape[2], x.shape[3], Bmat.shape[3]), dtype=acc)
