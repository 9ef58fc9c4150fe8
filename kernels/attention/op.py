"""attention as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

import torch
from torch import Tensor

from kernels.attention.eager import attention_backward_eager, attention_eager, attention_forward_with_lse
from kernels.attention.naive import attention_naive
from kernels.attention.upstream import attention_fa4, attention_flex, attention_sdpa, attention_upstream
from kernels.op_support import (
    IMPLS,
    bind_shapes,
    check_doc_ids,
    check_impl,
    check_shapes,
    opaque_op,
    resolve_impl,
)

PEERS = {"upstream": attention_upstream, "fa4": attention_fa4, "sdpa": attention_sdpa, "flex": attention_flex}


@opaque_op("kernels.attention.kernel:attention_fwd_kernel", eager_fp64=True)
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float, softcap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out (B,T,Hq,P), lse (B,Hq,T) in fp32 (fp64 for fp64)."""
    return attention_forward_with_lse(q, k, v, doc_ids, scale, softcap, window, causal)


@attention_fwd.register_fake
def _(q, k, v, doc_ids, scale, softcap, window, causal):
    B, T, Hq, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.promote_types(q.dtype, torch.float32))


@opaque_op("kernels.attention.kernel:attention_bwd_kernel", eager_fp64=True)
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v."""
    return attention_backward_eager(q, k, v, doc_ids, out, lse, dout, scale, softcap, window, causal)


@attention_bwd.register_fake
def _(q, k, v, doc_ids, out, lse, dout, scale, softcap, window, causal):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, doc_ids, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, doc_ids, out, lse)


def _backward(ctx, dout, _dlse):
    dq, dk, dv = attention_bwd(*ctx.saved_tensors, dout, *ctx.options)
    return dq, dk, dv, None, None, None, None, None


attention_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(q, k, v, doc_ids, softcap, window, impl):
    check_impl("attention", impl, (*IMPLS, *PEERS))
    named, sizes = bind_shapes("attention", "q:BTHP k:BTGP v:BTGP doc_ids:BT", q, k, v, doc_ids)
    if sizes["G"] < 1 or sizes["H"] % sizes["G"]:
        raise ValueError(
            f"attention: {sizes['H']} query heads are not a multiple of {sizes['G']} key/value heads"
        )
    check_shapes("attention", named, sizes)
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q, k, v must have one float dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    check_doc_ids("attention", doc_ids)
    if softcap < 0 or window < 0:
        raise ValueError(
            f"attention: softcap ({softcap}) and window ({window}) must be at least 0, 0 is none"
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, *, scale: float | None = None, softcap: float = 0.0,
    window: int = 0, causal: bool = True, impl: str = "op",
) -> Tensor:  # fmt: skip
    """Softmax attention with grouped heads, softcap, document mask and optional window.

    q (B,T,Hq,P), k and v (B,T,Hkv,P) in one float dtype, Hq a multiple of Hkv: query head h reads key/value
    head h // (Hq/Hkv). doc_ids (B,T) int32: a token sees its own document only; padding (-1) sees padding.
    scale: of the logits, None is 1/sqrt(P). softcap c > 0: s <- c tanh(s/c) after scale and before the mask.
    window w > 0: keys j with i - j < w (limits only the past, also if causal is False).
    impl "op" is opaque to the compiler, "eager" is traced; "upstream" (flash-attn 2), "sdpa", "fa4" and
    "flex" (both with the softcap as a score_mod) are the upstream implementations.
    -> (B,T,Hq,P) in q.dtype. Softmax is fp32 (fp64 for fp64).
    Raises ValueError on a wrong shape, dtype, head count, negative softcap or window, or impl, and on CUDA if P is
    not a power of two up to 128 (except fp64, which runs the eager form); ImportError on a missing package.
    Sources: GQA (Ainslie et al. 2023), softcap (Gemma 2, 2024), FlashAttention-2 (Dao 2023).
    """
    _check(q, k, v, doc_ids, softcap, window, impl)
    impl = resolve_impl(impl, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if impl == "naive":
        return attention_naive(q, k, v, doc_ids, scale, softcap, window, causal)
    if impl == "eager":
        return attention_eager(q, k, v, doc_ids, scale=scale, softcap=softcap, window=window, causal=causal)
    if impl in PEERS:
        return PEERS[impl](q, k, v, doc_ids, scale=scale, softcap=softcap, window=window, causal=causal)
    return attention_fwd(q, k, v, doc_ids, float(scale), float(softcap), window, causal)[0]
