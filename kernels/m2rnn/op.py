"""m2rnn as a custom op: opaque to Dynamo and Inductor in both directions.

B batch, T tokens, H heads, K key dim, V value dim.
"""

import torch
from torch import Tensor

from kernels.m2rnn.eager import m2rnn_backward_eager, m2rnn_eager, m2rnn_forward_with_states
from kernels.m2rnn.naive import m2rnn_recurrent
from kernels.op_support import autocast_disabled, bind_shapes, check_impl, check_scan, opaque_op, resolve_impl


@opaque_op("kernels.m2rnn.kernel:m2rnn_fwd_kernel")
def m2rnn_fwd(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, final state, and the state after every token (B,T,H,K,V) for the backward."""
    y, states = m2rnn_forward_with_states(q, k, v, W, f, doc_ids, h0)
    return y, states[:, -1], states


@m2rnn_fwd.register_fake
def _(q, k, v, W, f, doc_ids, h0):
    acc = torch.promote_types(v.dtype, torch.float32)
    states = h0.new_empty((*k.shape, v.shape[3]), dtype=acc)
    return v.new_empty(v.shape), h0.new_empty(h0.shape, dtype=acc), states


@opaque_op("kernels.m2rnn.kernel:m2rnn_bwd_kernel")
def m2rnn_bwd(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor,
    states: Tensor, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, W, f, h0."""
    return m2rnn_backward_eager(q, k, v, W, f, doc_ids, h0, states, dy, dfinal)


@m2rnn_bwd.register_fake
def _(q, k, v, W, f, doc_ids, h0, states, dy, dfinal):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, W, f, h0))


def _setup_context(ctx, inputs, output):
    _, _, states = output
    ctx.save_for_backward(*inputs, states)


def _backward(ctx, dy, dfinal, _dstates):
    dq, dk, dv, dW, df, dh0 = m2rnn_bwd(*ctx.saved_tensors, dy, dfinal)
    return dq, dk, dv, dW, df, None, dh0


m2rnn_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(q, k, v, W, f, doc_ids, h0, impl):
    check_impl("m2rnn", impl)
    spec = "k:BTHK v:BTHV q:BTHK W:HVV f:BTH doc_ids:BT h0:BHKV"
    named, sizes = bind_shapes("m2rnn", spec, k, v, q, W, f, doc_ids, h0)
    if sizes["T"] < 1:
        raise ValueError("m2rnn: T must be at least 1")
    check_scan("m2rnn", named, sizes, "q k v")


def m2rnn(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor | None = None,
    impl: str = "op",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The matrix-state recurrence h_t = f_t h + (1 - f_t) tanh(h W + k_t v_t^T), y_t = h_t^T q_t.

    q, k (B,T,H,K) and v (B,T,H,V) in one float dtype. In any float dtype: W (H,V,V); f (B,T,H), the forget
    gate in (0,1); h0 (B,H,K,V), or None for zeros. doc_ids (B,T) int32: h is zeroed where the id changes from
    one token to the next. impl "op" is opaque to the compiler, "eager" is traced as T steps;
    "op" keeps the state after every token for its backward, B T H K V elements in fp32 (fp64).
    -> y (B,T,H,V) in v.dtype, final state (B,H,K,V) in fp32 (fp64 for fp64 v).
    Raises ValueError on a wrong shape, dtype or impl. Source: Mishra et al. 2026 (arXiv 2603.14360).
    """
    _check(q, k, v, W, f, doc_ids, h0, impl)
    impl = resolve_impl(impl, v)
    if impl == "naive":
        return m2rnn_recurrent(q, k, v, W, f, doc_ids, h0)
    if impl == "eager":
        with autocast_disabled(v):
            return m2rnn_eager(q, k, v, W, f, doc_ids, h0)
    if h0 is None:
        acc = torch.promote_types(v.dtype, torch.float32)
        B, _, H, K = k.shape
        h0 = v.new_zeros((B, H, K, v.shape[3]), dtype=acc)
    y, final, _ = m2rnn_fwd(q, k, v, W, f, doc_ids, h0)
    return y, final
