"""Upstream attention with the signature of our op: flash-attn 2 and 4 (Dao), torch's SDPA and FlexAttention.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.op_support import document_borders, peer

INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"
INSTALL_FA4 = "pip install --pre flash-attn-4"
FA4_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")


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

    The package returns (out, lse): unwrap the tuple before any cast. A softcap is passed as a score_mod of this module:
    the package's own is reported to crash or to return wrong numbers if its versions and its compiler's do not match.
    Raises ImportError, before any kernel is compiled, if the installed package does not fit (`check_fa4`).
    """
    package = peer("attention", "flash_attn.cute", INSTALL_FA4)
    check_fa4(package)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window - 1, 0 if causal else None) if window else (None, None),
    }
    if softcap:
        options["score_mod"], options["score_mod_bwd"] = _fa4_softcap(softcap)
    borders = _borders(doc_ids)
    if borders is None:
        return _first(package.flash_attn_func(q, k, v, **options)).to(q.dtype)
    packed = (t.flatten(0, 1) for t in (q, k, v))
    out = package.flash_attn_varlen_func(*packed, cu_seqlens_q=borders, cu_seqlens_k=borders, **options)
    return _first(out).reshape(q.shape).to(q.dtype)


@cache
def _fa4_softcap(softcap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return s -> c tanh(s/c) on tiles of scaled logits, and its backward, as FA4 compiles them into its kernels."""
    cute = import_module("cutlass.cute")

    @cute.jit
    def capped(acc_S_SSA, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return softcap * cute.math.tanh(acc_S_SSA / softcap, fastmath=True)

    @cute.jit
    def capped_bwd(grad_out_SSA, score_SSA, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        tanh = cute.math.tanh(score_SSA / softcap, fastmath=True)
        return grad_out_SSA * (1.0 - tanh * tanh)

    return capped, capped_bwd


@cache
def check_fa4(package: Any) -> None:
    """Raise ImportError (one line) unless the installed flash_attn.cute is a flash-attn-4 that the adapter fits.

    Checked without running a kernel: that the module is of flash-attn-4 (flash-attn 2 contains an old copy), the
    versions of its compiler that its metadata requires, the arguments of its functions, and those that its kernels
    pass to a score_mod by position.
    """
    if reason := _fa4_fault(package):
        raise ImportError(f"attention: impl 'fa4' does not fit: {reason}; install it with: {INSTALL_FA4}")


def _fa4_fault(package: Any) -> str:
    try:
        found = metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed, so flash_attn.cute is the old copy in flash-attn 2"
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        if version == "(not installed)" or not requirement.specifier.contains(version, prereleases=True):
            return f"flash-attn-4 {found.version} requires {requirement}, installed is {version}"
    for name in FA4_FUNCTIONS:
        taken = inspect.signature(getattr(package, name)).parameters
        if missing := {"score_mod", "score_mod_bwd"} - taken.keys():
            return f"{name} of flash-attn-4 {found.version} has no {', '.join(sorted(missing))}"
    theirs = import_module("flash_attn.cute.utils")
    makers = (theirs.create_softcap_scoremod, theirs.create_softcap_scoremod_bwd)
    for own, maker in zip(_fa4_softcap(1.0), makers, strict=True):
        passed, expected = (", ".join(inspect.signature(mod).parameters) for mod in (maker(1.0), own))
        if passed != expected:
            return f"flash-attn-4 {found.version} passes ({passed}) to a score_mod, not ({expected})"
    return ""


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
    starts, borders = document_borders(doc_ids)
    if borders is not None and any(
        row.unique().numel() != int(begun) for row, begun in zip(doc_ids, starts.sum(1))
    ):
        raise ValueError("attention: this impl takes documents of adjacent tokens only")
    return borders
