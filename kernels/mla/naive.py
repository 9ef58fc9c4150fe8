"""The core of multi-head latent attention, as defined: one head after the other, with an explicit mask.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._documents import seen_by


def mla_naive(
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, scale=None, softcap=0.0, causal=True
) -> Tensor:
    """Compute the formula directly: in its inputs' dtype except for the softmax, one head after the other."""
    scale = (q_nope.shape[3] + q_rope.shape[3]) ** -0.5 if scale is None else scale
    seen = seen_by(doc_ids, causal=causal)
    heads = []
    for h in range(q_nope.shape[2]):
        key, value = c_kv @ W_uk[h].T, c_kv @ W_uv[h].T
        s = (q_nope[:, :, h] @ key.mT + q_rope[:, :, h] @ k_rope.mT) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~seen, -torch.inf)
        p = torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32)).to(s.dtype)
        heads.append(p @ value)
    return torch.stack(heads, 2)
