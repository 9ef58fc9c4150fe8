"""Key selection, sparse attention and the indexer's loss as custom ops: Triton on CUDA, eager elsewhere.

B batch, T tokens, J index heads, P head dim (of the indexer or of the attention), K chosen keys per query,
Hq and Hkv heads.
"""

import torch
from torch import Tensor

from kernels.dsa_indexer.eager import (
    dsa_attention_backward_eager,
    dsa_attention_eager,
    dsa_attention_forward_with_lse,
    dsa_chosen_scores_backward_eager,
    dsa_chosen_scores_eager,
    dsa_distribution_eager,
    dsa_indexer_eager,
    dsa_loss_eager,
)
from kernels.dsa_indexer.naive import dsa_attention_naive, dsa_chosen_scores_naive, dsa_distribution_naive
from kernels.op_support import (
    autocast_disabled,
    bind_shapes,
    check_doc_ids,
    check_floating,
    check_impl,
    check_shapes,
    opaque_op,
    resolve_impl,
)


@opaque_op("kernels.dsa_indexer.kernel:dsa_indexer_fwd_kernel", eager_fp64=True)
def dsa_indexer_fwd(q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor, top_k: int) -> Tensor:
    """Return indices (B,T,K) int32; they have no gradient."""
    return dsa_indexer_eager(q, k, weights, doc_ids, top_k)


@dsa_indexer_fwd.register_fake
def _(q, k, weights, doc_ids, top_k):
    return q.new_empty((*q.shape[:2], top_k), dtype=torch.int32)


@opaque_op("kernels.dsa_indexer.kernel:dsa_attention_fwd_kernel", eager_fp64=True)
def dsa_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return out (B,T,Hq,P), lse (B,Hq,T) in fp32 (fp64 for fp64)."""
    return dsa_attention_forward_with_lse(q, k, v, indices, scale, softcap)


@dsa_attention_fwd.register_fake
def _(q, k, v, indices, scale, softcap):
    B, T, Hq, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.promote_types(q.dtype, torch.float32))


@opaque_op("kernels.dsa_indexer.kernel:dsa_attention_bwd_kernel", eager_fp64=True)
def dsa_attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v."""
    return dsa_attention_backward_eager(q, k, v, indices, out, lse, dout, scale, softcap)


@dsa_attention_bwd.register_fake
def _(q, k, v, indices, out, lse, dout, scale, softcap):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, indices, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, indices, out, lse)


def _backward(ctx, dout, _dlse):
    dq, dk, dv = dsa_attention_bwd(*ctx.saved_tensors, dout, *ctx.options)
    return dq, dk, dv, None, None, None


dsa_attention_fwd.register_autograd(_backward, setup_context=_setup_context)


@opaque_op("kernels.dsa_indexer.kernel:dsa_chosen_scores_fwd_kernel", eager_fp64=True)
def dsa_chosen_scores_fwd(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Return the index scores of the chosen keys (B,T,K) in fp32 (fp64 for fp64), 0 for an index -1."""
    return dsa_chosen_scores_eager(q, k, weights, indices)


@dsa_chosen_scores_fwd.register_fake
def _(q, k, weights, indices):
    return q.new_empty(indices.shape, dtype=torch.promote_types(q.dtype, torch.float32))


@opaque_op("kernels.dsa_indexer.kernel:dsa_chosen_scores_bwd_kernel", eager_fp64=True)
def dsa_chosen_scores_bwd(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, weights."""
    return dsa_chosen_scores_backward_eager(q, k, weights, indices, dscores)


@dsa_chosen_scores_bwd.register_fake
def _(q, k, weights, indices, dscores):
    return tuple(t.new_empty(t.shape) for t in (q, k, weights))


def _save_for_scores(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _scores_backward(ctx, dscores):
    return *dsa_chosen_scores_bwd(*ctx.saved_tensors, dscores), None


dsa_chosen_scores_fwd.register_autograd(_scores_backward, setup_context=_save_for_scores)


@opaque_op("kernels.dsa_indexer.kernel:dsa_distribution_fwd_kernel", eager_fp64=True)
def dsa_distribution_fwd(q: Tensor, k: Tensor, indices: Tensor, scale: float, softcap: float) -> Tensor:
    """Return (B,T,K) in fp32 (fp64 for fp64); it has no gradient."""
    return dsa_distribution_eager(q, k, indices, scale, softcap)


@dsa_distribution_fwd.register_fake
def _(q, k, indices, scale, softcap):
    return q.new_empty(indices.shape, dtype=torch.promote_types(q.dtype, torch.float32))


def _check_index(op, q, k, weights):
    check_shapes(op, *bind_shapes(op, "q:BTJP k:BTP weights:BTJ", q, k, weights))
    check_floating(op, {"q": q, "k": k, "weights": weights})
    if q.dtype != k.dtype:
        raise ValueError(f"{op}: q and k must have one float dtype, not {q.dtype} and {k.dtype}")


def _check_choice(op, q, indices):
    if indices.dim() != 3 or indices.dtype != torch.int32:
        raise ValueError(f"{op}: indices must be (B,T,K) int32, not {indices.dim()}-d {indices.dtype}")
    check_shapes(op, *bind_shapes(op, "q:BTHP indices:BTK", q, indices))


def _check_attention(op, q, k, indices, softcap):
    named, sizes = bind_shapes(op, "q:BTHP k:BTGP", q, k)
    if sizes["G"] < 1 or sizes["H"] % sizes["G"]:
        raise ValueError(f"{op}: {sizes['H']} query heads are not a multiple of {sizes['G']} key/value heads")
    check_shapes(op, named, sizes)
    check_floating(op, {"q": q})
    if q.dtype != k.dtype:
        raise ValueError(f"{op}: q and k must have one float dtype, not {q.dtype} and {k.dtype}")
    _check_choice(op, q, indices)
    if softcap < 0:
        raise ValueError(f"{op}: softcap ({softcap}) must be at least 0, 0 is none")


def dsa_indexer(
    q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor, *, top_k: int, impl: str = "op"
) -> Tensor:
    """The top_k keys of each query by I[t,s] = sum_h w[t,h] relu(q_h[t].k[s]), causal and within the document.

    q (B,T,J,P) and k (B,T,P) in one float dtype, weights (B,T,J) in any, doc_ids (B,T) int32 (padding is one more
    document). impl "op" is opaque to the compiler, "eager" is traced.
    -> indices (B,T,top_k) int32: distinct positions along T, ascending, padded with -1 if the document has fewer.
    Ties choose the earlier key. Scores are fp32 (fp64 for fp64); the selection has no gradient, see
    `dsa_indexer_loss`, and needs no device sync.
    Raises ValueError on a wrong shape, dtype, top_k or impl; on CUDA also where P is not a power of two up to 128, or T
    is above 16384 (except fp64, which runs the eager form).
    Source: DeepSeek-V3.2-Exp (2025).
    """
    check_impl("dsa_indexer", impl, ("eager", "op"))
    _check_index("dsa_indexer", q, k, weights)
    check_shapes("dsa_indexer", *bind_shapes("dsa_indexer", "q:BTJP doc_ids:BT", q, doc_ids))
    check_doc_ids("dsa_indexer", doc_ids)
    if top_k < 1:
        raise ValueError(f"dsa_indexer: top_k ({top_k}) must be at least 1")
    impl = resolve_impl(impl, q)
    function = dsa_indexer_fwd if impl == "op" else dsa_indexer_eager
    return function(q, k, weights, doc_ids, top_k)


def dsa_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float | None = None, softcap: float = 0.0,
    impl: str = "op",
) -> Tensor:  # fmt: skip
    """Softmax attention of each query over its chosen keys alone, with grouped heads and softcap.

    q (B,T,Hq,P), k and v (B,T,Hkv,P) in one float dtype, Hq a multiple of Hkv. indices (B,T,K) int32 in any order:
    positions along T, distinct within a query, or -1 for none. Values are not checked: the caller ensures causality
    and document limits. scale: of the logits, None is 1/sqrt(P). softcap c > 0: s <- c tanh(s/c).
    impl "op" is opaque to the compiler, "eager" is traced.
    -> (B,T,Hq,P) in q.dtype, 0 for a query without keys. Softmax is fp32 (fp64 for fp64); gradients are
    bitwise deterministic.
    Raises ValueError on a wrong shape, dtype, head count, negative softcap or impl; on CUDA also where P is not a
    power of two up to 128 (except fp64, which runs the eager form).
    Sources: DeepSeek-V3.2-Exp (2025), GQA (Ainslie et al. 2023), softcap (Gemma 2, 2024).
    """
    check_impl("dsa_attention", impl)
    _check_attention("dsa_attention", q, k, indices, softcap)
    check_shapes("dsa_attention", *bind_shapes("dsa_attention", "k:BTGP v:BTGP", k, v))
    if v.dtype != q.dtype:
        raise ValueError(f"dsa_attention: q and v must have one float dtype, not {q.dtype} and {v.dtype}")
    impl = resolve_impl(impl, q)
    if impl == "naive":
        return dsa_attention_naive(q, k, v, indices, scale, softcap)
    if impl == "eager":
        return dsa_attention_eager(q, k, v, indices, scale=scale, softcap=softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return dsa_attention_fwd(q, k, v, indices, float(scale), float(softcap))[0]


def dsa_distribution(
    q: Tensor, k: Tensor, indices: Tensor, *, scale: float | None = None, softcap: float = 0.0,
    impl: str = "op",
) -> Tensor:  # fmt: skip
    """Target of the indexer: the attention weights of the chosen keys, mean over heads, without gradient.

    Arguments and errors as `dsa_attention` -> (B,T,K) in fp32 (fp64 for fp64), 0 for an index -1.
    """
    check_impl("dsa_distribution", impl)
    _check_attention("dsa_distribution", q, k, indices, softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = float(scale), float(softcap)
    with torch.no_grad():
        if impl == "naive":
            return dsa_distribution_naive(q, k, indices, *options)
        if resolve_impl(impl, q) == "op":
            return dsa_distribution_fwd(q, k, indices, *options)
        with autocast_disabled(q):
            return dsa_distribution_eager(q, k, indices, *options)


def dsa_chosen_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, *, impl: str = "op") -> Tensor:
    """Index scores I[t,s] of the chosen keys only, differentiable.

    q, k, weights as in `dsa_indexer`, indices (B,T,K) int32 as in `dsa_attention`. impl "op" is opaque to the compiler,
    "eager" is traced.
    -> (B,T,K) in fp32 (fp64 for fp64), 0 for an index -1. The gradients of q, k and weights are bitwise deterministic.
    Raises ValueError on a wrong shape, dtype or impl; on CUDA also where P is not a power of two up to 128 (but for
    fp64, which runs the eager form). Source: DeepSeek-V3.2-Exp (2025).
    """
    check_impl("dsa_chosen_scores", impl)
    _check_index("dsa_chosen_scores", q, k, weights)
    _check_choice("dsa_chosen_scores", q, indices)
    if impl == "naive":
        return dsa_chosen_scores_naive(q, k, weights, indices)
    if resolve_impl(impl, q) == "op":
        return dsa_chosen_scores_fwd(q, k, weights, indices)
    with autocast_disabled(q):
        return dsa_chosen_scores_eager(q, k, weights, indices)


def dsa_indexer_loss(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, target: Tensor, *, impl: str = "op"
) -> Tensor:
    """KL(target || softmax of the index scores over the chosen keys), mean over the B*T queries: a scalar, fp32.

    Arguments and errors as `dsa_chosen_scores`, target (B,T,K) floating point from `dsa_distribution`. The divergence
    is eager torch. Its gradient flows to q, k and weights.
    Source: DeepSeek-V3.2-Exp (2025), the loss of the sparse stage.
    """
    scores = dsa_chosen_scores(q, k, weights, indices, impl=impl)
    check_shapes(
        "dsa_indexer_loss", *bind_shapes("dsa_indexer_loss", "indices:BTK target:BTK", indices, target)
    )
    check_floating("dsa_indexer_loss", {"target": target})
    with autocast_disabled(q):
        return dsa_loss_eager(scores, indices, target)
