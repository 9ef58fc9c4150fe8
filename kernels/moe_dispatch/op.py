"""moe_dispatch as a custom op: opaque to Dynamo and Inductor in both directions.

B batch, T tokens, D model dim, E experts, K top-k.
"""

import torch
from torch import Tensor

from kernels.moe_dispatch.eager import moe_dispatch_backward_eager, moe_dispatch_eager
from kernels.moe_dispatch.naive import moe_dispatch_naive
from kernels.op_support import bind_shapes, check_floating, check_impl, check_shapes, opaque_op, resolve_impl


@opaque_op("kernels.moe_dispatch.kernel:moe_dispatch_fwd_kernel")
def moe_dispatch_fwd(
    x: Tensor, expert: Tensor, num_experts: int, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded (E, B*bucket, D), slot (B,T,K), overflow ()."""
    return moe_dispatch_eager(x, expert, num_experts, bucket)


@moe_dispatch_fwd.register_fake
def _(x, expert, num_experts, bucket):
    B, _, D = x.shape
    padded = x.new_empty((num_experts, B * bucket, D))
    return padded, expert.new_empty(expert.shape), expert.new_empty(())


@opaque_op("kernels.moe_dispatch.kernel:moe_dispatch_bwd_kernel")
def moe_dispatch_bwd(dpadded: Tensor, expert: Tensor, slot: Tensor, bucket: int) -> Tensor:
    """Gradient of x (B,T,D)."""
    return moe_dispatch_backward_eager(dpadded, expert, slot, bucket)


@moe_dispatch_bwd.register_fake
def _(dpadded, expert, slot, bucket):
    B, T, _ = expert.shape
    return dpadded.new_empty((B, T, dpadded.shape[2]))


def _setup_context(ctx, inputs, output):
    _, expert, _, ctx.bucket = inputs
    ctx.save_for_backward(expert, output[1])


def _backward(ctx, dpadded, _dslot, _doverflow):
    expert, slot = ctx.saved_tensors
    return moe_dispatch_bwd(dpadded, expert, slot, ctx.bucket), None, None, None


moe_dispatch_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(x, expert, num_experts, bucket, impl):
    check_impl("moe_dispatch", impl)
    check_shapes("moe_dispatch", *bind_shapes("moe_dispatch", "x:BTD expert:BTK", x, expert))
    check_floating("moe_dispatch", {"x": x})
    if expert.dtype != torch.int64:
        raise ValueError(f"moe_dispatch: expert must be int64, not {expert.dtype}")
    if num_experts < 1 or bucket < 1:
        raise ValueError(
            f"moe_dispatch: num_experts ({num_experts}) and bucket ({bucket}) must be at least 1"
        )


def moe_dispatch(
    x: Tensor, expert: Tensor, num_experts: int, bucket: int, impl: str = "op"
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token into a slot of each of its K experts; every sequence has `bucket` slots per expert.

    x (B,T,D) float, expert (B,T,K) int64 in 0..num_experts-1 (not checked: that would force a device sync), or -1
    for no expert: a null assignment takes no slot and does not count as overflow.
    Slots are taken in token order, then k order. impl "op" is opaque to the compiler, "eager" is traced
    through.
    -> padded (E, B*bucket, D) in x.dtype: row b*bucket + slot of padded[e] is the token, unused rows are 0;
       slot (B,T,K) int64, -1 if the expert's bucket was full or expert is -1; overflow () int64, dropped assignments.
    Backward: the sum over the K slots of a token, in fp32. B may be symbolic.
    Raises ValueError on a wrong shape, dtype, num_experts, bucket or impl.
    Source: GShard (Lepikhin et al. 2020).
    """
    _check(x, expert, num_experts, bucket, impl)
    impl = resolve_impl(impl, x)
    functions = {"op": moe_dispatch_fwd, "eager": moe_dispatch_eager, "naive": moe_dispatch_naive}
    return functions[impl](x, expert, num_experts, bucket)
