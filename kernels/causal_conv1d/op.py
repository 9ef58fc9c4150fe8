"""causal_conv1d as a custom op: opaque to Dynamo and Inductor in both directions.

B batch, T tokens, D channels, W conv width.
"""

from torch import Tensor

from kernels.causal_conv1d.eager import ACTIVATIONS, causal_conv1d_backward_eager, causal_conv1d_eager
from kernels.causal_conv1d.naive import causal_conv1d_naive
from kernels.causal_conv1d.upstream import causal_conv1d_upstream
from kernels.op_support import (
    WITH_PEER,
    bind_shapes,
    check_doc_ids,
    check_floating,
    check_impl,
    check_shapes,
    opaque_op,
    resolve_impl,
)


@opaque_op("kernels.causal_conv1d.kernel:causal_conv1d_fwd_kernel")
def causal_conv1d_fwd(x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, activation: str) -> Tensor:
    """Return y (B,T,D)."""
    return causal_conv1d_eager(x, weight, bias, doc_ids, activation)


@causal_conv1d_fwd.register_fake
def _(x, weight, bias, doc_ids, activation):
    return x.new_empty(x.shape)


@opaque_op("kernels.causal_conv1d.kernel:causal_conv1d_bwd_kernel")
def causal_conv1d_bwd(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, dy: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias."""
    return causal_conv1d_backward_eager(x, weight, bias, doc_ids, dy, activation)


@causal_conv1d_bwd.register_fake
def _(x, weight, bias, doc_ids, dy, activation):
    return tuple(t.new_empty(t.shape) for t in (x, weight, bias))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    dx, dweight, dbias = causal_conv1d_bwd(*ctx.saved_tensors, dy, ctx.activation)
    return dx, dweight, dbias, None, None


causal_conv1d_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(x, weight, bias, doc_ids, activation, impl):
    check_impl("causal_conv1d", impl, WITH_PEER)
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {activation!r}, choices are {ACTIVATIONS}")
    spec = "x:BTD weight:DW bias:D doc_ids:BT"
    named, sizes = bind_shapes("causal_conv1d", spec, x, weight, bias, doc_ids)
    if sizes["W"] < 1:
        raise ValueError("causal_conv1d: weight needs at least one tap")
    check_shapes("causal_conv1d", named, sizes)
    check_floating("causal_conv1d", {"x": x, "weight": weight, "bias": bias})
    check_doc_ids("causal_conv1d", doc_ids)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, activation: str = "silu", impl: str = "op"
) -> Tensor:
    """Depthwise causal convolution over tokens; taps from another document are zero.

    x (B,T,D), weight (D,W) with the current token's tap last, bias (D,): any float dtypes.
    doc_ids (B,T) int32: a tap counts where its document id equals the current token's.
    activation "silu" or "none". impl "op" is opaque to the compiler, "eager" is traced,
    "upstream" is the package causal-conv1d.
    -> (B,T,D) in x.dtype, accumulated in fp32 (fp64 for fp64 x).
    Raises ValueError on a wrong shape, dtype, activation or impl, ImportError if the package is missing.
    Source: Mamba (Gu & Dao 2023).
    """
    _check(x, weight, bias, doc_ids, activation, impl)
    impl = resolve_impl(impl, x)
    functions = {
        "op": causal_conv1d_fwd,
        "eager": causal_conv1d_eager,
        "naive": causal_conv1d_naive,
        "upstream": causal_conv1d_upstream,
    }
    return functions[impl](x, weight, bias, doc_ids, activation)
