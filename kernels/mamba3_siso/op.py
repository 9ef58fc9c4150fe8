"""mamba3_siso as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

import torch
from torch import Tensor

from kernels.mamba3_siso.eager import mamba3_siso_backward_eager, mamba3_siso_eager
from kernels.mamba3_siso.naive import Mamba3Inputs, Mamba3State, mamba3_siso_recurrent, zero_state
from kernels.mamba3_siso.upstream import mamba3_siso_upstream
from kernels.op_support import (
    WITH_PEER,
    autocast_disabled,
    bind_shapes,
    check_impl,
    check_scan,
    opaque_op,
    resolve_impl,
    scan_schemas,
)

FORWARD, BACKWARD = scan_schemas(Mamba3Inputs, Mamba3State)
INPUTS = len(Mamba3Inputs._fields)
SHAPES = (
    "v:BTHP q:BTGN angles:BTHR k:BTGN adt:BTH dt:BTH trap:BTH q_bias:HN k_bias:HN D:H z:BTHP doc_ids:BT "
    "state.theta:BHR state.h:BHPN state.k_prev:BHN state.v_prev:BHP"
)


@opaque_op("kernels.mamba3_siso.kernel:mamba3_siso_fwd_kernel", eager_fp64=True, schema=FORWARD)
def mamba3_siso_fwd(*arguments):
    """Return y and the final state."""
    *tensors, chunk_size = arguments
    y, state = mamba3_siso_eager(Mamba3Inputs(*tensors[:INPUTS]), Mamba3State(*tensors[INPUTS:]), chunk_size)
    return y, *state


@mamba3_siso_fwd.register_fake
def _(*arguments):
    v, state = arguments[2], arguments[INPUTS:-1]
    acc = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(v.shape), *(t.new_empty(t.shape, dtype=acc) for t in state)


@opaque_op("kernels.mamba3_siso.kernel:mamba3_siso_bwd_kernel", eager_fp64=True, schema=BACKWARD)
def mamba3_siso_bwd(*arguments):
    """Gradients of the floating-point inputs, in their order."""
    i, (*state, chunk_size, dy) = Mamba3Inputs(*arguments[:INPUTS]), arguments[INPUTS:-4]
    dstate = Mamba3State(*arguments[-4:])
    return list(mamba3_siso_backward_eager(i, Mamba3State(*state), chunk_size, dy, dstate))


@mamba3_siso_bwd.register_fake
def _(*arguments):
    *inputs, _ = arguments[:INPUTS]
    return [t.new_empty(t.shape) for t in (*inputs, *arguments[INPUTS : INPUTS + 4])]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    *given, dtheta, dh, dk_prev, dv_prev = mamba3_siso_bwd(*ctx.saved_tensors, ctx.chunk_size, *grads)
    return *given, None, dtheta, dh, dk_prev, dv_prev, None


mamba3_siso_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(i, state, chunk_size, impl):
    check_impl("mamba3_siso", impl, WITH_PEER)
    order = (i.v, i.q, i.angles, i.k, *i[3:8], *i[9:])
    named, sizes = bind_shapes("mamba3_siso", SHAPES, *order, *(state or ()))
    T, H, G, R, N = (sizes[axis] for axis in "THGRN")
    if T < 1 or H % G or 2 * R > N:
        raise ValueError(
            f"mamba3_siso: expected T >= 1, H divisible by G and 2R <= N, not T={T}, H={H}, G={G}, R={R}, N={N}"
        )
    check_scan("mamba3_siso", named, sizes, "q k v z", chunk_size)


def mamba3_siso(
    i: Mamba3Inputs, state: Mamba3State | None = None, chunk_size: int = 64, impl: str = "op"
) -> tuple[Tensor, Mamba3State]:
    """The Mamba-3 SISO scan with bias, rotation, skip and gate; for the maths and the shapes see naive.py.

    q, k, v and z in one float dtype, the others in any. state None is zeros. `chunk_size` (tokens) changes speed and
    rounding, not the function. impl "op" is opaque to the compiler, "eager" is traced, "upstream" is the upstream
    implementation.
    -> y (B,T,H,P) in v.dtype, final state (theta in radians) in fp32 (fp64 for fp64 v).
    Raises ValueError on a wrong shape, dtype, chunk size or impl, ImportError if a package is missing.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    _check(i, state, chunk_size, impl)
    impl = resolve_impl(impl, i.v)
    if impl == "naive":
        return mamba3_siso_recurrent(i, state)
    if impl == "eager":
        with autocast_disabled(i.v):
            return mamba3_siso_eager(i, state, chunk_size)
    if impl == "upstream":
        return mamba3_siso_upstream(i, state)
    y, *final = mamba3_siso_fwd(*i, *(zero_state(i) if state is None else state), chunk_size)
    return y, Mamba3State(*final)
