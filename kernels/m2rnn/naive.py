"""M2RNN, a recurrence over a matrix state, as defined: token by token.

    n_t = tanh(h_{t-1} W + k_t v_t^T)        h_t = f_t h_{t-1} + (1 - f_t) n_t        y_t = h_t^T q_t

h is zero before the first token of a document; the initial state belongs to the first document of its row.
The tanh makes the recurrence non-linear and rules out a parallel form.

B batch, T tokens, H heads, K key dim, V value dim (the state is K by V).
Source: Mishra et al. 2026, "M2RNN: Non-Linear RNNs with Matrix-Valued States" (arXiv 2603.14360).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._scan import document_starts


def m2rnn_step(q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token: the definition, and the decode path.

    q and k (B,H,K), v (B,H,V), W (H,V,V), f (B,H) in (0,1), state (B,H,K,V)
    -> y (B,H,V) in v.dtype, new state in fp32 (fp64 for fp64 v). The caller zeroes the state where a new
    document begins.
    """
    acc = torch.promote_types(v.dtype, torch.float32)
    query, key, value, W, f, state = (t.to(acc) for t in (q, k, v, W, f, state))
    f = f[..., None, None]
    new = torch.tanh(state @ W + key.unsqueeze(-1) * value.unsqueeze(-2))
    state = f * state + (1 - f) * new
    return (query.unsqueeze(-2) @ state).squeeze(-2).to(v.dtype), state


def m2rnn_recurrent(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the step token by token; arguments and results as for `m2rnn_eager`."""
    state = first_state(k, v, h0)
    keep = ~document_starts(doc_ids)
    outputs = []
    for t in range(v.shape[1]):
        state = state * keep[:, t, None, None, None]
        y, state = m2rnn_step(q[:, t], k[:, t], v[:, t], W, f[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def first_state(k: Tensor, v: Tensor, h0: Tensor | None) -> Tensor:
    acc = torch.promote_types(v.dtype, torch.float32)
    if h0 is not None:
        return h0.to(acc)
    return v.new_zeros((*k.shape[:1], *k.shape[2:], v.shape[3]), dtype=acc)
