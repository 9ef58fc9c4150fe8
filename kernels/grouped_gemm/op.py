"""grouped_gemm as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

M rows, E experts, D_in and D_out model dims on both sides.
"""

import torch
from torch import Tensor

from kernels.grouped_gemm.eager import grouped_gemm_backward_eager, grouped_gemm_eager
from kernels.grouped_gemm.naive import grouped_gemm_naive
from kernels.grouped_gemm.padded import grouped_gemm_padded
from kernels.grouped_gemm.upstream import grouped_gemm_upstream
from kernels.op_support import WITH_PEER, bind_shapes, check_impl, check_shapes, opaque_op

IMPLS = (*WITH_PEER, "padded")


@opaque_op("kernels.grouped_gemm.kernel:grouped_gemm_fwd_kernel", eager_fp64=True)
def grouped_gemm_fwd(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return y (M,D_out)."""
    return grouped_gemm_eager(x, weight, counts)


@grouped_gemm_fwd.register_fake
def _(x, weight, counts):
    return x.new_empty((x.shape[0], weight.shape[2]))


@opaque_op("kernels.grouped_gemm.kernel:grouped_gemm_bwd_kernel", eager_fp64=True)
def grouped_gemm_bwd(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, weight."""
    return grouped_gemm_backward_eager(x, weight, counts, dy)


@grouped_gemm_bwd.register_fake
def _(x, weight, counts, dy):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return *grouped_gemm_bwd(*ctx.saved_tensors, dy), None


grouped_gemm_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(x, weight, counts, impl, bucket):
    check_impl("grouped_gemm", impl, IMPLS)
    named, sizes = bind_shapes("grouped_gemm", "weight:EDF x:MD counts:E", weight, x, counts)
    if min(weight.shape) < 1:
        raise ValueError(f"grouped_gemm: weight has shape {tuple(weight.shape)}, no side may be empty")
    check_shapes("grouped_gemm", named, sizes)
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_gemm: x and weight must have one float dtype, not {x.dtype}, {weight.dtype}"
        )
    if counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"grouped_gemm: counts must be int32 or int64, not {counts.dtype}")
    if bucket is not None and (impl != "padded" or bucket < 1):
        raise ValueError(f"grouped_gemm: bucket is for impl 'padded' and at least 1, not {impl!r}, {bucket}")


def grouped_gemm(
    x: Tensor, weight: Tensor, counts: Tensor, impl: str = "op", bucket: int | None = None
) -> Tensor:
    """Each expert's rows times the expert's matrix.

    x (M,D_in), weight (E,D_in,D_out): one float dtype. counts (E,) int32 or int64: rows of each expert, in order;
    none negative, with a sum of at most M. This is not validated: it would force a device sync. Rows beyond the
    sum belong to no expert: zero in the result and in the gradient, whatever they contain.
    impl "op" is opaque to the compiler and, on CUDA, never reads the counts on the host; "eager" does.
    "padded" is a batched product of `bucket` rows per expert, a static size: None takes the power of two that holds
    the largest count, and reads it on the host; a row that exceeds its bucket is nan.
    "upstream" is torch's grouped_mm, for counts that sum to M.
    -> (M,D_out) in x.dtype; sums are fp32 (fp64 for fp64), also those over the rows in weight's gradient.
    Raises ValueError on a wrong shape, dtype, bucket or impl, ImportError if torch lacks grouped_mm.
    Source: MegaBlocks (Gale et al. 2022).
    """
    _check(x, weight, counts, impl, bucket)
    if impl == "padded":
        return grouped_gemm_padded(x, weight, counts, bucket)
    functions = {
        "op": grouped_gemm_fwd,
        "eager": grouped_gemm_eager,
        "naive": grouped_gemm_naive,
        "upstream": grouped_gemm_upstream,
    }
    return functions[impl](x, weight, counts)
