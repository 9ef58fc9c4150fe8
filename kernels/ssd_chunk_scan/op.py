"""ssd_chunk_scan as a custom op: opaque to Dynamo and Inductor in both directions. Triton on CUDA, eager elsewhere.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

import torch
from torch import Tensor

from kernels.op_support import (
    WITH_PEER,
    autocast_disabled,
    bind_shapes,
    check_impl,
    check_scan,
    opaque_op,
    resolve_impl,
)
from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_backward_eager, ssd_chunk_scan_eager
from kernels.ssd_chunk_scan.naive import SsdInputs, first_state, ssd_chunk_scan_recurrent
from kernels.ssd_chunk_scan.upstream import ssd_chunk_scan_upstream


@opaque_op("kernels.ssd_chunk_scan.kernel:ssd_chunk_scan_fwd_kernel", eager_fp64=True)
def ssd_chunk_scan_fwd(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return ssd_chunk_scan_eager(SsdInputs(x, dt, A, Bmat, Cmat, D, doc_ids), initial_state, chunk_size)


@ssd_chunk_scan_fwd.register_fake
def _(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size):
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(initial_state.shape, dtype=acc)


@opaque_op("kernels.ssd_chunk_scan.kernel:ssd_chunk_scan_bwd_kernel", eager_fp64=True)
def ssd_chunk_scan_bwd(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor, chunk_size: int, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    i = SsdInputs(x, dt, A, Bmat, Cmat, D, doc_ids)
    return ssd_chunk_scan_backward_eager(i, initial_state, chunk_size, dy, dfinal)


@ssd_chunk_scan_bwd.register_fake
def _(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size, dy, dfinal):
    return tuple(t.new_empty(t.shape) for t in (x, dt, A, Bmat, Cmat, D, initial_state))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy, dfinal):
    dx, ddt, dA, dB, dC, dD, dinitial = ssd_chunk_scan_bwd(*ctx.saved_tensors, ctx.chunk_size, dy, dfinal)
    return dx, ddt, dA, dB, dC, dD, None, dinitial, None


ssd_chunk_scan_fwd.register_autograd(_backward, setup_context=_setup_context)


def _check(i, initial_state, chunk_size, impl):
    check_impl("ssd_chunk_scan", impl, WITH_PEER)
    spec = "x:BTHP Bmat:BTGN Cmat:BTGN dt:BTH A:H D:H doc_ids:BT initial_state:BHPN"
    tensors = (i.x, i.Bmat, i.Cmat, i.dt, i.A, i.D, i.doc_ids, initial_state)
    named, sizes = bind_shapes("ssd_chunk_scan", spec, *tensors)
    T, H, G = (sizes[axis] for axis in "THG")
    if T < 1 or H % G:
        raise ValueError(f"ssd_chunk_scan: expected T >= 1 and H divisible by G, not T={T}, H={H}, G={G}")
    check_scan("ssd_chunk_scan", named, sizes, "x Bmat Cmat", chunk_size)


def ssd_chunk_scan(
    i: SsdInputs, initial_state: Tensor | None = None, chunk_size: int = 64, impl: str = "op"
) -> tuple[Tensor, Tensor]:
    """The Mamba-2 scan h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t; the shapes: naive.py.

    x, Bmat and Cmat in one float dtype, the others in any. initial_state (B,H,P,N), None is zeros. `chunk_size`
    (tokens) changes speed and rounding, not the function. impl "op" is opaque to the compiler, "eager" is traced,
    "upstream" is the upstream implementation.
    -> y (B,T,H,P) in x.dtype, final state (B,H,P,N) in fp32 (fp64 for fp64 x).
    Raises ValueError on a wrong shape, dtype, chunk size or impl, ImportError if a package is missing.
    Source: Dao & Gu 2024 (arXiv 2405.21060).
    """
    _check(i, initial_state, chunk_size, impl)
    impl = resolve_impl(impl, i.x)
    if impl == "naive":
        return ssd_chunk_scan_recurrent(i, initial_state)
    if impl == "eager":
        with autocast_disabled(i.x):
            return ssd_chunk_scan_eager(i, initial_state, chunk_size)
    if impl == "upstream":
        return ssd_chunk_scan_upstream(i, initial_state)
    state = first_state(i, None) if initial_state is None else initial_state
    return ssd_chunk_scan_fwd(*i, state, chunk_size)
