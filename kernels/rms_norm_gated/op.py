"""rms_norm_gated as a custom op: opaque to Dynamo and Inductor in both directions.

D channels, S group size.
"""

from torch import Tensor

from kernels.op_support import WITH_PEER, check_floating, check_impl, has_shape, opaque_op, resolve_impl
from kernels.rms_norm_gated.eager import rms_norm_gated_backward_eager, rms_norm_gated_eager
from kernels.rms_norm_gated.naive import rms_norm_gated_naive
from kernels.rms_norm_gated.upstream import rms_norm_gated_upstream


@opaque_op("kernels.rms_norm_gated.kernel:rms_norm_gated_fwd_kernel")
def rms_norm_gated_fwd(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """Return y (..., D)."""
    return rms_norm_gated_eager(x, gate, weight, eps, group_size, norm_before_gate)


@rms_norm_gated_fwd.register_fake
def _(x, gate, weight, eps, group_size, norm_before_gate):
    return x.new_empty(x.shape)


@opaque_op("kernels.rms_norm_gated.kernel:rms_norm_gated_bwd_kernel")
def rms_norm_gated_bwd(
    x: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate, weight."""
    return rms_norm_gated_backward_eager(x, gate, weight, dy, eps, group_size, norm_before_gate)


@rms_norm_gated_bwd.register_fake
def _(x, gate, weight, dy, eps, group_size, norm_before_gate):
    return tuple(t.new_empty(t.shape) for t in (x, gate, weight))


def _setup_context(ctx, inputs, output):
    x, gate, weight, *ctx.options = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx, dy):
    dx, dgate, dweight = rms_norm_gated_bwd(*ctx.saved_tensors, dy, *ctx.options)
    return dx, dgate, dweight, None, None, None


rms_norm_gated_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(x, gate, weight, eps, group_size, impl) -> int:
    """Validate the inputs and return the group size."""
    check_impl("rms_norm_gated", impl, WITH_PEER)
    if x.dim() < 1:
        raise ValueError("rms_norm_gated: x must be (..., D), not 0-d")
    D = x.shape[-1]
    S = D if group_size is None else group_size
    for name, tensor, shape in (("gate", gate, x.shape), ("weight", weight, (D,))):
        if not has_shape(tensor, shape):
            raise ValueError(
                f"rms_norm_gated: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}"
            )
    check_floating("rms_norm_gated", {"x": x, "gate": gate, "weight": weight})
    if S < 1 or D % S:
        raise ValueError(f"rms_norm_gated: {D} channels do not split into groups of {S}")
    if eps < 0:
        raise ValueError(f"rms_norm_gated: eps must be at least 0, not {eps}")
    return S


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, impl: str = "op",
) -> Tensor:  # fmt: skip
    """RMS(x silu(gate)) weight, or with norm_before_gate RMS(x) weight silu(gate).

    x and gate (..., D), weight (D,): any float dtypes. group_size: channels that share one RMS, a divisor
    of D; None is D. impl "op" is opaque to the compiler, "eager" is traced,
    "upstream" is the upstream implementation.
    -> (..., D) in x.dtype; fp32 inside (fp64 for fp64 x).
    Raises ValueError on a wrong shape, dtype, group_size, eps or impl, ImportError if a package is missing.
    Source: Mamba-2 (Dao & Gu 2024).
    """
    S = _check(x, gate, weight, eps, group_size, impl)
    impl = resolve_impl(impl, x)
    functions = {
        "op": rms_norm_gated_fwd,
        "eager": rms_norm_gated_eager,
        "naive": rms_norm_gated_naive,
        "upstream": rms_norm_gated_upstream,
    }
    return functions[impl](x, gate, weight, eps, S, norm_before_gate)
