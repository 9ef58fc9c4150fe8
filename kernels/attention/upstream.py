"""Upstream attention with the signature of our op: flash-attn 2 (Dao).

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"


def attention_upstream(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """flash-attn 2: arguments and result of `attention`, on CUDA in fp16 or bf16.

    Rows with several documents are passed as one varlen batch; doc_ids is read on the host for their lengths. Raises
    ImportError if the package is not installed, ValueError if an id recurs after another one in its row.
    """
    package = peer("attention", "flash_attn", INSTALL)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window - 1, 0 if causal else -1) if window else (-1, -1),
        "softcap": softcap,
    }
    borders = _borders(doc_ids)
    if borders is None:
        return package.flash_attn_func(q, k, v, **options)
    longest = int(borders.diff().max())
    packed = (t.flatten(0, 1) for t in (q, k, v))
    return package.flash_attn_varlen_func(*packed, borders, borders, longest, longest, **options).reshape(
        q.shape
    )


def _borders(doc_ids: Tensor) -> Tensor | None:
    """Document offsets (cu_seqlens) in the flattened batch, int32; None if every row is one document."""
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    if not bool(starts[:, 1:].any()):
        return None
    if any(row.unique().numel() != int(begun) for row, begun in zip(doc_ids, starts.sum(1))):
        raise ValueError("attention: this impl takes documents of adjacent tokens only")
    return torch.cat((starts.flatten().nonzero().flatten(), doc_ids.new_tensor([doc_ids.numel()]))).to(
        torch.int32
    )
