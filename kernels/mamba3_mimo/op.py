"""mamba3_mimo as a custom op: opaque to Dynamo and Inductor in both directions. Plain torch on every device.

We have no Triton kernel for it: on CUDA too the op runs the reference, whose products use cuBLAS in fp32.
B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
"""

import torch
from torch import Tensor

from kernels.mamba3_mimo.eager import mamba3_mimo_backward_eager, mamba3_mimo_eager
from kernels.mamba3_mimo.naive import Mamba3MimoInputs, Mamba3MimoState, mamba3_mimo_recurrent, zero_state
from kernels.mamba3_mimo.upstream import mamba3_mimo_upstream
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

FORWARD, BACKWARD = scan_schemas(Mamba3MimoInputs, Mamba3MimoState)
INPUTS = len(Mamba3MimoInputs._fields)
SHAPES = (
    "v:BTHP q:BTRGN angles:BTHA k:BTRGN adt:BTH dt:BTH trap:BTH q_bias:HRN k_bias:HRN mimo_v:HRP mimo_z:HRP "
    "mimo_out:HRP D:H z:BTHP doc_ids:BT state.theta:BHA state.h:BHPN state.k_prev:BHRN state.v_prev:BHP"
)


@opaque_op(schema=FORWARD)
def mamba3_mimo_fwd(*arguments):
    """Return y and the final state."""
    *tensors, chunk_size = arguments
    y, state = mamba3_mimo_eager(
        Mamba3MimoInputs(*tensors[:INPUTS]), Mamba3MimoState(*tensors[INPUTS:]), chunk_size
    )
    return y, *state


@mamba3_mimo_fwd.register_fake
def _(*arguments):
    v, state = arguments[2], arguments[INPUTS:-1]
    acc = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(v.shape), *(t.new_empty(t.shape, dtype=acc) for t in state)


@opaque_op(schema=BACKWARD)
def mamba3_mimo_bwd(*arguments):
    """Gradients of the floating-point inputs, in their order."""
    i, (*state, chunk_size, dy) = Mamba3MimoInputs(*arguments[:INPUTS]), arguments[INPUTS:-4]
    dstate = Mamba3MimoState(*arguments[-4:])
    return list(mamba3_mimo_backward_eager(i, Mamba3MimoState(*state), chunk_size, dy, dstate))


@mamba3_mimo_bwd.register_fake
def _(*arguments):
    *inputs, _ = arguments[:INPUTS]
    return [t.new_empty(t.shape) for t in (*inputs, *arguments[INPUTS : INPUTS + 4])]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    *given, dtheta, dh, dk_prev, dv_prev = mamba3_mimo_bwd(*ctx.saved_tensors, ctx.chunk_size, *grads)
    return *given, None, dtheta, dh, dk_prev, dv_prev, None


mamba3_mimo_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(i, state, chunk_size, impl):
    check_impl("mamba3_mimo", impl, WITH_PEER)
    order = (i.v, i.q, i.angles, i.k, *i[3:11], *i[12:])
    named, sizes = bind_shapes("mamba3_mimo", SHAPES, *order, *(state or ()))
    T, R, H, G, A, N = (sizes[axis] for axis in "TRHGAN")
    if T < 1 or R < 1 or H % G or 2 * A > N:
        raise ValueError(
            "mamba3_mimo: expected T >= 1, R >= 1, H divisible by G and 2A <= N, not "
            f"T={T}, R={R}, H={H}, G={G}, A={A}, N={N}"
        )
    check_scan("mamba3_mimo", named, sizes, "q k v z", chunk_size)


def mamba3_mimo(
    i: Mamba3MimoInputs, state: Mamba3MimoState | None = None, chunk_size: int = 16, impl: str = "op"
) -> tuple[Tensor, Mamba3MimoState]:
    """The Mamba-3 MIMO scan with bias, rotation, skip, gate and three projections; for maths and shapes see naive.py.

    q, k, v and z in one float dtype, the others in any. state None is zeros. `chunk_size` (tokens, so R times as many
    rows) changes speed and rounding, not the function. impl "op" is opaque to the compiler, "eager" is traced through,
    "upstream" is the upstream implementation.
    -> y (B,T,H,P) in v.dtype, final state (theta in radians) in fp32 (fp64 for fp64 v).
    Raises ValueError on a wrong shape, dtype, chunk size or impl, ImportError if a package is missing.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    _check(i, state, chunk_size, impl)
    impl = resolve_impl(impl, i.v)
    if impl == "naive":
        return mamba3_mimo_recurrent(i, state)
    if impl == "eager":
        with autocast_disabled(i.v):
            return mamba3_mimo_eager(i, state, chunk_size)
    if impl == "upstream":
        return mamba3_mimo_upstream(i, state, chunk_size)
    y, *final = mamba3_mimo_fwd(*i, *(zero_state(i) if state is None else state), chunk_size)
    return y, Mamba3MimoState(*final)
