"""moe_combine as a custom op: opaque to Dynamo and Inductor in both directions.

B batch, T tokens, D model dim, E experts, K top-k.
"""

import torch
from torch import Tensor

from kernels.moe_combine.eager import moe_combine_backward_eager, moe_combine_eager
from kernels.moe_combine.naive import moe_combine_naive
from kernels.op_support import bind_shapes, check_impl, check_shapes, opaque_op, resolve_impl


@opaque_op("kernels.moe_combine.kernel:moe_combine_fwd_kernel")
def moe_combine_fwd(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, out_dtype: torch.dtype
) -> Tensor:
    """Return out (B,T,D) in out_dtype."""
    return moe_combine_eager(y, expert, slot, weights, bucket, out_dtype)


@moe_combine_fwd.register_fake
def _(y, expert, slot, weights, bucket, out_dtype):
    B, T, _ = expert.shape
    return y.new_empty((B, T, y.shape[2]), dtype=out_dtype)


@opaque_op("kernels.moe_combine.kernel:moe_combine_bwd_kernel")
def moe_combine_bwd(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y and weights."""
    return moe_combine_backward_eager(y, expert, slot, weights, bucket, dout)


@moe_combine_bwd.register_fake
def _(y, expert, slot, weights, bucket, dout):
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.bucket, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    dy, dweights = moe_combine_bwd(*ctx.saved_tensors, ctx.bucket, dout)
    return dy, None, None, dweights, None, None


moe_combine_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(y, expert, slot, weights, bucket, out_dtype, impl):
    check_impl("moe_combine", impl)
    spec = "y:ESD expert:BTK slot:BTK weights:BTK"  # S = B * bucket
    named, sizes = bind_shapes("moe_combine", spec, y, expert, slot, weights)
    if bucket < 1 or y.shape[1] != expert.shape[0] * bucket:
        raise ValueError(
            f"moe_combine: y has {y.shape[1]} rows per expert, expected B * bucket = {expert.shape[0]} * {bucket}"
        )
    check_shapes("moe_combine", named, sizes)
    if expert.dtype != torch.int64 or slot.dtype != torch.int64:
        raise ValueError(f"moe_combine: expert and slot must be int64, not {expert.dtype} and {slot.dtype}")
    if weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"moe_combine: combine weights stay fp32, not {weights.dtype}: low-precision products diverge"
        )
    for name, dtype in (("y", y.dtype), ("out", out_dtype)):
        if not dtype.is_floating_point:
            raise ValueError(f"moe_combine: {name} must be floating point, not {dtype}")


def moe_combine(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int,
    out_dtype: torch.dtype | None = None, impl: str = "op",
) -> Tensor:  # fmt: skip
    """out[b,t] = sum_k weights[b,t,k] y[expert, b*bucket + slot]; a dropped one (slot -1) adds nothing.

    y (E, B*bucket, D) float, expert and slot (B,T,K) int64 as returned by moe_dispatch, weights (B,T,K) fp32
    (or fp64). impl "op" is opaque to the compiler, "eager" is traced.
    -> (B,T,D) in out_dtype, y.dtype if None. Multiplied and summed in fp32 (fp64 for fp64), one cast at the
       end.
    Backward: gradients of y (in y.dtype) and of weights (in weights.dtype). B may be symbolic.
    Raises ValueError on a wrong shape, dtype, bucket or impl, and on bf16 or fp16 weights.
    Source: GShard (Lepikhin et al. 2020).
    """
    out_dtype = y.dtype if out_dtype is None else out_dtype
    _check(y, expert, slot, weights, bucket, out_dtype, impl)
    impl = resolve_impl(impl, y)
    if impl == "naive":
        return moe_combine_naive(y, expert, slot, weights, bucket).to(out_dtype)
    function = moe_combine_fwd if impl == "op" else moe_combine_eager
    return function(y, expert, slot, weights, bucket, out_dtype)
