"""cross_entropy as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

V vocabulary.
"""

import torch
from torch import Tensor

from kernels.cross_entropy.eager import (
    cross_entropy_backward_eager,
    cross_entropy_eager,
    cross_entropy_with_sums,
)
from kernels.cross_entropy.naive import cross_entropy_naive
from kernels.op_support import check_floating, check_impl, has_shape, opaque_op, resolve_impl


@opaque_op("kernels.cross_entropy.kernel:cross_entropy_fwd_kernel", eager_fp64=True)
def cross_entropy_fwd(
    logits: Tensor, target: Tensor, softcap: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, shift, total: (...) each, in fp32 (fp64 for fp64). shift + log(total) is the logsumexp.

    Each implementation may choose its shift; the backward receives shift and total.
    """
    return cross_entropy_with_sums(logits, target, softcap, ignore_index)


@cross_entropy_fwd.register_fake
def _(logits, target, softcap, ignore_index):
    acc = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(target.shape, dtype=acc) for _ in range(3))


@opaque_op("kernels.cross_entropy.kernel:cross_entropy_bwd_kernel", eager_fp64=True)
def cross_entropy_bwd(
    logits: Tensor, target: Tensor, shift: Tensor, total: Tensor, dloss: Tensor,
    softcap: float, ignore_index: int,
) -> Tensor:  # fmt: skip
    """Gradient of the logits."""
    return cross_entropy_backward_eager(logits, target, shift, total, dloss, softcap, ignore_index)


@cross_entropy_bwd.register_fake
def _(logits, target, shift, total, dloss, softcap, ignore_index):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, target, *ctx.options = inputs
    _, shift, total = output
    ctx.mark_non_differentiable(shift, total)
    ctx.save_for_backward(logits, target, shift, total)


def _backward(ctx, dloss, _dshift, _dtotal):
    return cross_entropy_bwd(*ctx.saved_tensors, dloss, *ctx.options), None, None, None


cross_entropy_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(logits, target, softcap, impl):
    check_impl("cross_entropy", impl)
    check_floating("cross_entropy", {"logits": logits})
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"cross_entropy: logits must be (..., V) with V at least 1, not {tuple(logits.shape)}"
        )
    if not has_shape(target, logits.shape[:-1]):
        shapes = f"{tuple(target.shape)}, expected {tuple(logits.shape[:-1])}"
        raise ValueError(f"cross_entropy: target has shape {shapes}")
    if target.dtype != torch.int64:
        raise ValueError(f"cross_entropy: target must be int64, not {target.dtype}")
    if softcap < 0:
        raise ValueError(f"cross_entropy: softcap must be at least 0, not {softcap}; 0 is none")


def cross_entropy(
    logits: Tensor, target: Tensor, softcap: float = 0.0, ignore_index: int = -100, impl: str = "op"
) -> Tensor:
    """Cross entropy of each token, without reduction: the caller takes the mean over tokens.

    logits (..., V): any float dtype. target (...) int64: a token of 0..V-1, or ignore_index, whose loss and
    gradient are exactly zero whatever its logits contain, even nan. softcap c > 0: logits <- c tanh(logits/c).
    impl "op" is opaque to the compiler, "eager" is traced.
    -> loss (...) in fp32 (fp64 for fp64 logits); fp32 inside, the gradient cast once to logits.dtype.
    Raises ValueError on a wrong shape or dtype, a negative softcap, or impl. The target range is not validated,
    which would need a device sync: torch's gather fails on other values, Triton returns nan (loss and gradient).
    Source: softcap (Gemma 2, 2024).
    """
    _check(logits, target, softcap, impl)
    impl = resolve_impl(impl, logits)
    if impl != "op":
        function = cross_entropy_naive if impl == "naive" else cross_entropy_eager
        return function(logits, target, softcap, ignore_index)
    return cross_entropy_fwd(logits, target, float(softcap), ignore_index)[0]
