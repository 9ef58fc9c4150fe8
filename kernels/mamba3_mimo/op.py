"""mamba3_mimo as a custom op: opaque to Dynamo and Inductor in both directions. Plain torch on every device.

We have no Triton kernel for it: on CUDA too the op runs the reference, whose products use cuBLAS in fp32.
B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
"""

import torch
from torch import Tensor

from kernels.mamba3_mimo.eager import mamba3_mimo_backward_eager, mamba3_mimo_eager
from kernels.mamba3_mimo.naive import Mamba3MimoState, mamba3_mimo_recurrent, zero_state
from kernels.mamba3_mimo.upstream import mamba3_mimo_upstream
from kernels.op_support import (
    WITH_PEER,
    autocast_disabled,
    bind_shapes,
    check_impl,
    check_scan,
    opaque_op,
    resolve_impl,
)


@opaque_op()
def mamba3_mimo_fwd(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    theta: Tensor, h: Tensor, k_prev: Tensor, v_prev: Tensor, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids)
    y, state = mamba3_mimo_eager(*inputs, Mamba3MimoState(theta, h, k_prev, v_prev), chunk_size)
    return y, *state


@mamba3_mimo_fwd.register_fake
def _(
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids,
    theta, h, k_prev, v_prev, chunk_size,
):  # fmt: skip
    acc = torch.promote_types(v.dtype, torch.float32)
    state = (t.new_empty(t.shape, dtype=acc) for t in (theta, h, k_prev, v_prev))
    return v.new_empty(v.shape), *state


@opaque_op()
def mamba3_mimo_bwd(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    theta: Tensor, h: Tensor, k_prev: Tensor, v_prev: Tensor, chunk_size: int,
    dy: Tensor, dtheta: Tensor, dh: Tensor, dk_prev: Tensor, dv_prev: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the floating-point inputs, in their order."""
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids)
    state, dstate = (Mamba3MimoState(theta, h, k_prev, v_prev), Mamba3MimoState(dtheta, dh, dk_prev, dv_prev))
    return list(mamba3_mimo_backward_eager(*inputs, state, chunk_size, dy, dstate))


@mamba3_mimo_bwd.register_fake
def _(
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids,
    theta, h, k_prev, v_prev, chunk_size, dy, dtheta, dh, dk_prev, dv_prev,
):  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z)
    return [t.new_empty(t.shape) for t in (*inputs, theta, h, k_prev, v_prev)]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    *given, dtheta, dh, dk_prev, dv_prev = mamba3_mimo_bwd(*ctx.saved_tensors, ctx.chunk_size, *grads)
    return *given, None, dtheta, dh, dk_prev, dv_prev, None


mamba3_mimo_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids, state, chunk_size, impl
):  # fmt: skip
    check_impl("mamba3_mimo", impl, WITH_PEER)
    spec = (
        "v:BTHP q:BTRGN angles:BTHA k:BTRGN adt:BTH dt:BTH trap:BTH q_bias:HRN k_bias:HRN mimo_v:HRP mimo_z:HRP "
        "mimo_out:HRP D:H z:BTHP doc_ids:BT state.theta:BHA state.h:BHPN state.k_prev:BHRN state.v_prev:BHP"
    )
    tensors = (
        v, q, angles, k, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, D, z, doc_ids, *(state or ())
    )  # fmt: skip
    named, sizes = bind_shapes("mamba3_mimo", spec, *tensors)
    T, R, H, G, A, N = (sizes[axis] for axis in "TRHGAN")
    if T < 1 or R < 1 or H % G or 2 * A > N:
        raise ValueError(
            "mamba3_mimo: expected T >= 1, R >= 1, H divisible by G and 2A <= N, not "
            f"T={T}, R={R}, H={H}, G={G}, A={A}, N={N}"
        )
    check_scan("mamba3_mimo", named, sizes, "q k v z", chunk_size)


def mamba3_mimo(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    state: Mamba3MimoState | None = None, chunk_size: int = 16, impl: str = "op",
) -> tuple[Tensor, Mamba3MimoState]:  # fmt: skip
    """The Mamba-3 MIMO scan with bias, rotation, skip, gate and its three projections; the maths: naive.py.

    q, k (B,T,R,G,N) normalised, v, z (B,T,H,P) in one float dtype. In any float dtype: adt (B,T,H) = A dt,
    negative; dt (B,T,H) after softplus; trap (B,T,H) before the sigmoid; q_bias, k_bias (H,R,N); mimo_v, mimo_z
    and mimo_out (H,R,P), up-projections of v and z and down-projection of the result; angles (B,T,H,A) before the
    tanh, 2A <= N, each rotating an adjacent pair of state dims; D (H,); state, or None for zeros. doc_ids (B,T)
    int32: the state is zeroed where the id changes from one token to the next. `chunk_size` (tokens, so R times as
    many rows) changes speed and rounding, not the function. impl "op" is opaque to the compiler, "eager" is
    traced through, "upstream" is the upstream implementation.
    -> y (B,T,H,P) in v.dtype, final state (theta in radians) in fp32 (fp64 for fp64 v).
    Raises ValueError on a wrong shape, dtype, chunk size or impl, ImportError if a package is missing.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z, doc_ids)
    _check(*inputs, state, chunk_size, impl)
    impl = resolve_impl(impl, v)
    if impl == "naive":
        return mamba3_mimo_recurrent(*inputs, state)
    if impl == "eager":
        with autocast_disabled(v):
            return mamba3_mimo_eager(*inputs, state, chunk_size)
    if impl == "upstream":
        return mamba3_mimo_upstream(*inputs, state, chunk_size)
    state = zero_state(v, q, angles) if state is None else state
    y, *final = mamba3_mimo_fwd(*inputs, *state, chunk_size)
    return y, Mamba3MimoState(*final)
