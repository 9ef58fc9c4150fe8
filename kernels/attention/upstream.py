"""Upstream attention with the signature of our op: flash-attn 2 and 4 (Dao), torch's SDPA and FlexAttention.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"
INSTALL_FA4 = "pip install --pre flash-attn-4"


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


def attention_fa4(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """flash-attn 4 (CuTe DSL): arguments, result and errors as `attention_upstream`.

    The package returns (out, lse): unwrap the tuple before any cast. Its softcap is a score_mod with its own
    backward.
    """
    package = peer("attention", "flash_attn.cute", INSTALL_FA4)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window - 1, 0 if causal else None) if window else (None, None),
        "softcap": softcap,
    }
    borders = _borders(doc_ids)
    if borders is None:
        return _first(package.flash_attn_func(q, k, v, **options)).to(q.dtype)
    packed = (t.flatten(0, 1) for t in (q, k, v))
    out = package.flash_attn_varlen_func(*packed, cu_seqlens_q=borders, cu_seqlens_k=borders, **options)
    return _first(out).reshape(q.shape).to(q.dtype)


def attention_sdpa(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention on any device; its fused kernels take one document per row.

    Several documents or a window are passed as a mask (B,1,T,T). Raises ValueError on a softcap (not supported).
    """
    if softcap:
        raise ValueError("attention: impl 'sdpa' has no softcap; use 'op' or 'upstream'")
    mask = None
    if window or _borders(doc_ids) is not None:
        token = torch.arange(q.shape[1], device=q.device)
        behind = token[:, None] - token[None, :]
        seen = (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)) & ((behind < window) if window else True)
        mask = ((seen & (behind >= 0)) if causal else seen).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, is_causal=causal and mask is None, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return out.transpose(1, 2)


def attention_flex(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *,
    scale: float | None = None, softcap: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """torch's FlexAttention with the softcap as a score_mod: after the scale and before the mask, as in our op.

    Fused if the caller is compiled; torch has no backward for it on CPU and raises an error.
    """

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = doc_ids[b, i] == doc_ids[b, j]
        mask = mask & (i >= j) if causal else mask
        return mask & (i - j < window) if window else mask

    (B, T), device = doc_ids.shape, str(q.device)
    out = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), score_mod=capped if softcap else None, scale=scale, enable_gqa=True,
        block_mask=create_block_mask(seen, B, None, T, T, device=device),
    )  # fmt: skip
    return out.transpose(1, 2)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


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
