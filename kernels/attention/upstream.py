"""The peer of attention: the CUDA kernels of flash-attn 2 (Dao), behind our signature."""

import torch
from torch import Tensor

from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"


def attention_upstream(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Arguments and result of `attention`, on CUDA in fp16 or bf16. Raises ImportError where it is absent.

    Rows that hold several documents go as one varlen batch; doc_ids is read on the host for their lengths. An id
    that comes back after another one in its row would be two documents here: ValueError.
    """
    package = peer("attention", "flash_attn", INSTALL)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window - 1, 0 if causal else -1) if window else (-1, -1),
        "softcap": softcap,
    }
    B, T = doc_ids.shape
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    if not bool(starts[:, 1:].any()):
        return package.flash_attn_func(q, k, v, **options)
    if any(row.unique().numel() != int(begun) for row, begun in zip(doc_ids, starts.sum(1))):
        raise ValueError("attention: impl 'upstream' takes documents of adjacent tokens only")
    borders = torch.cat((starts.flatten().nonzero().flatten(), doc_ids.new_tensor([B * T]))).to(torch.int32)
    longest = int(borders.diff().max())
    out = package.flash_attn_varlen_func(
        *(t.reshape(B * T, *t.shape[2:]) for t in (q, k, v)), borders, borders, longest, longest, **options
    )
    return out.reshape(q.shape)
