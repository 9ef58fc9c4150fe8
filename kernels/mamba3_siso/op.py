"""mamba3_siso as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

import torch
from torch import Tensor

from kernels.mamba3_siso.eager import mamba3_siso_backward_eager, mamba3_siso_eager
from kernels.mamba3_siso.naive import Mamba3State, mamba3_siso_recurrent, zero_state
from kernels.mamba3_siso.upstream import mamba3_siso_upstream
from kernels.op_support import (
    WITH_PEER,
    autocast_disabled,
    bind_shapes,
    check_impl,
    check_scan,
    opaque_op,
    resolve_impl,
)


@opaque_op("kernels.mamba3_siso.kernel:mamba3_siso_fwd_kernel", eager_fp64=True)
def mamba3_siso_fwd(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    theta: Tensor, h: Tensor, k_prev: Tensor, v_prev: Tensor, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    y, state = mamba3_siso_eager(*inputs, Mamba3State(theta, h, k_prev, v_prev), chunk_size)
    return y, *state


@mamba3_siso_fwd.register_fake
def _(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size):
    acc = torch.promote_types(v.dtype, torch.float32)
    state = (t.new_empty(t.shape, dtype=acc) for t in (theta, h, k_prev, v_prev))
    return v.new_empty(v.shape), *state


@opaque_op("kernels.mamba3_siso.kernel:mamba3_siso_bwd_kernel", eager_fp64=True)
def mamba3_siso_bwd(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor,
    theta: Tensor, h: Tensor, k_prev: Tensor, v_prev: Tensor, chunk_size: int,
    dy: Tensor, dtheta: Tensor, dh: Tensor, dk_prev: Tensor, dv_prev: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the floating-point inputs, in their order."""
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    state, dstate = Mamba3State(theta, h, k_prev, v_prev), Mamba3State(dtheta, dh, dk_prev, dv_prev)
    return list(mamba3_siso_backward_eager(*inputs, state, chunk_size, dy, dstate))


@mamba3_siso_bwd.register_fake
def _(
    q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size,
    dy, dtheta, dh, dk_prev, dv_prev,
):  # fmt: skip
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, theta, h, k_prev, v_prev)
    return [t.new_empty(t.shape) for t in inputs]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    *given, dtheta, dh, dk_prev, dv_prev = mamba3_siso_bwd(*ctx.saved_tensors, ctx.chunk_size, *grads)
    return *given, None, dtheta, dh, dk_prev, dv_prev, None


mamba3_siso_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, state, chunk_size, impl):
    check_impl("mamba3_siso", impl, WITH_PEER)
    spec = (
        "v:BTHP q:BTGN angles:BTHR k:BTGN adt:BTH dt:BTH trap:BTH q_bias:HN k_bias:HN D:H z:BTHP doc_ids:BT "
        "state.theta:BHR state.h:BHPN state.k_prev:BHN state.v_prev:BHP"
    )
    tensors = (v, q, angles, k, adt, dt, trap, q_bias, k_bias, D, z, doc_ids, *(state or ()))
    named, sizes = bind_shapes("mamba3_siso", spec, *tensors)
    T, H, G, R, N = (sizes[axis] for axis in "THGRN")
    if T < 1 or H % G or 2 * R > N:
        raise ValueError(
            f"mamba3_siso: expected T >= 1, H divisible by G and 2R <= N, not T={T}, H={H}, G={G}, R={R}, N={N}"
        )
    check_scan("mamba3_siso", named, sizes, "q k v z", chunk_size)


def mamba3_siso(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor, state: Mamba3State | None = None,
    chunk_size: int = 64, impl: str = "op",
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """The Mamba-3 SISO scan with bias, rotation, skip and gate; for the maths see naive.py.

    q, k (B,T,G,N) normalised, v, z (B,T,H,P) in one float dtype. In any float dtype: adt (B,T,H) = A dt,
    negative; dt (B,T,H) after softplus; trap (B,T,H) before the sigmoid; q_bias, k_bias (H,N); angles
    (B,T,H,R) before the tanh, 2R <= N; D (H,); state, or None for zeros. doc_ids (B,T) int32: the state is
    zeroed where the id changes from one token to the next. `chunk_size` (tokens) changes speed and rounding,
    not the function. impl "op" is opaque to the compiler, "eager" is traced,
    "upstream" is the upstream implementation.
    -> y (B,T,H,P) in v.dtype, final state (theta in radians) in fp32 (fp64 for fp64 v).
    Raises ValueError on a wrong shape, dtype, chunk size or impl, ImportError if a package is missing.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    _check(*inputs, state, chunk_size, impl)
    impl = resolve_impl(impl, v)
    if impl == "naive":
        return mamba3_siso_recurrent(*inputs, state)
    if impl == "eager":
        with autocast_disabled(v):
            return mamba3_siso_eager(*inputs, state, chunk_size)
    if impl == "upstream":
        return mamba3_siso_upstream(*inputs, state)
    state = zero_state(v, q, angles) if state is None else state
    y, *final = mamba3_siso_fwd(*inputs, *state, chunk_size)
    return y, Mamba3State(*final)
