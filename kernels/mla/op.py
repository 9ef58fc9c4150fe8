"""mla as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

B batch, T tokens, S query tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and
of the values.
"""

import torch
from torch import Tensor

from kernels.mla.eager import mla_absorbed_eager, mla_backward_eager, mla_eager, mla_forward_with_lse
from kernels.mla.naive import mla_naive
from kernels.op_support import (
    autocast_disabled,
    bind_shapes,
    check_doc_ids,
    check_impl,
    check_shapes,
    opaque_op,
    resolve_impl,
)


@opaque_op("kernels.mla.kernel:mla_fwd_kernel", eager_fp64=True)
def mla_fwd(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (B,T,H,Pv), lse (B,H,T) in fp32 (fp64 for fp64)."""
    return mla_forward_with_lse(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, scale, softcap, causal)


@mla_fwd.register_fake
def _(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, scale, softcap, causal):
    B, T, H, _ = q_nope.shape
    lse_dtype = torch.promote_types(q_nope.dtype, torch.float32)
    return q_nope.new_empty((B, T, H, W_uv.shape[1])), q_nope.new_empty((B, H, T), dtype=lse_dtype)


@opaque_op("kernels.mla.kernel:mla_bwd_kernel", eager_fp64=True)
def mla_bwd(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    out: Tensor, lse: Tensor, dout: Tensor, scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q_nope, q_rope, c_kv, k_rope, W_uk, W_uv."""
    inputs = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)
    return mla_backward_eager(*inputs, out, lse, dout, scale, softcap, causal)


@mla_bwd.register_fake
def _(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, out, lse, dout, scale, softcap, causal):
    return tuple(t.new_empty(t.shape) for t in (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv))


def _setup_context(ctx, inputs, output):
    *tensors, scale, softcap, causal = inputs
    out, lse = output
    ctx.options = (scale, softcap, causal)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, out, lse)  # the latent, not the keys and values of the heads


def _backward(ctx, dout, _dlse):
    grads = mla_bwd(*ctx.saved_tensors, dout, *ctx.options)
    return *grads, None, None, None, None


mla_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(op, q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, softcap):
    spec = "q_nope:BSHP q_rope:BSHR c_kv:BTC k_rope:BTR W_uk:HPC W_uv:HVC doc_ids:BT"
    named, sizes = bind_shapes(op, spec, q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)
    check_shapes(op, named, sizes)
    tensors = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv)
    if not q_nope.is_floating_point() or any(t.dtype != q_nope.dtype for t in tensors):
        raise ValueError(f"{op}: its inputs must have one float dtype, not {[t.dtype for t in tensors]}")
    check_doc_ids(op, doc_ids)
    if softcap < 0:
        raise ValueError(f"{op}: softcap ({softcap}) must be at least 0, 0 is none")


def mla(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    *, scale: float | None = None, softcap: float = 0.0, causal: bool = True, impl: str = "op",
) -> Tensor:  # fmt: skip
    """The attention core of multi-head latent attention, in its train form: k = [W_uk c, k_rope], v = W_uv c.

    q_nope (B,T,H,P), q_rope (B,T,H,R) and k_rope (B,T,R), both rotated by the caller, c_kv (B,T,C) normalised by the
    caller, W_uk (H,P,C), W_uv (H,Pv,C): one float dtype. doc_ids (B,T) int32: a token sees its own document only;
    padding (-1) sees padding. scale: of the logits, None is 1/sqrt(P+R). softcap c > 0: s <- c tanh(s/c) after scale
    and before the mask. impl "op" is opaque to the compiler, "eager" is traced.
    -> (B,T,H,Pv) in q_nope.dtype. Softmax is fp32 (fp64 for fp64). Saved for the backward are the inputs, the output
    and the logsumexp: keys and values are recomputed.
    Raises ValueError on a wrong shape, dtype, negative softcap or impl; on CUDA also where P, R or Pv is not a power
    of two up to 128 (except fp64, which runs the eager form).
    Sources: DeepSeek-V2 (2024), softcap (Gemma 2, 2024), FlashAttention-2 (Dao 2023).
    """
    check_impl("mla", impl)
    inputs = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)
    _check("mla", *inputs, softcap)
    if q_nope.shape[1] != c_kv.shape[1]:
        raise ValueError(
            f"mla: {q_nope.shape[1]} queries for {c_kv.shape[1]} tokens; mla_absorbed takes fewer"
        )
    impl = resolve_impl(impl, q_nope)
    if impl == "naive":
        return mla_naive(*inputs, scale, softcap, causal)
    if impl == "eager":
        return mla_eager(*inputs, scale=scale, softcap=softcap, causal=causal)
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale
    return mla_fwd(*inputs, float(scale), float(softcap), causal)[0]


def mla_absorbed(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    *, scale: float | None = None, softcap: float = 0.0, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Absorbed form of `mla`: W_uk is applied to the queries and W_uv to the output, without per-head keys or values.

    Arguments as `mla`, but q_nope (B,S,H,P) and q_rope (B,S,H,R) may be of the last S <= T tokens only: a decoding
    step has a cache of c_kv and k_rope, and queries of one token. Plain torch, differentiable, fp32 inside.
    -> (B,S,H,Pv) in q_nope.dtype. Raises ValueError on a wrong shape, dtype or negative softcap.
    """
    inputs = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)
    _check("mla_absorbed", *inputs, softcap)
    if q_nope.shape[1] > c_kv.shape[1]:
        raise ValueError(f"mla_absorbed: {q_nope.shape[1]} queries for {c_kv.shape[1]} tokens")
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale
    with autocast_disabled(q_nope):
        return mla_absorbed_eager(*inputs, float(scale), float(softcap), causal)
