"""mamba3_siso in Triton: launches the kernels of kernel_forward.py and kernel_backward.py.

    prepare     decays summed along each chunk, weights of the tokens, spans of the documents.
    turn        the running angle of each token, as cosine and sine.
    state       one program per (row, head) walks the chunks; the state stays in registers, what enters a chunk is
                written once.
    scan        every chunk by itself: scores, decayed, on the values; the entering state; skip and gate.

The backward runs prepare, turn and state again, then its own kernels in the order of kernel_backward.py.
Every sum over programs is made by one program in a fixed order: the same bits every time.

Rounding: sums, angles and states are fp32 or better, operands of products are v.dtype, also weighted keys, scores
and the states between chunks. fp32 inputs take the FMA units.

Bytes for B4 T4096 H112 P64 N64 G8 in bf16, forward: v, z and y 117 MB each, rotations and states 235 MB each written
and read: 1.3 GB, 0.31 ms at 4.2 TB/s, against a floor of 0.4 GB.
B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mamba3_siso.kernel_backward import (
    SUMS,
    gate_gradient_kernel,
    head_sum_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    state_gradient_kernel,
    token_gradient_kernel,
)
from kernels.mamba3_siso.kernel_forward import ROWS, prepare_kernel, scan_kernel, state_kernel, turn_kernel

LONGEST = {
    2: 64,
    4: 32,
}  # places of a chunk by the bytes of an element: a chunk's tiles must fit into registers
PREPARED_HEADS = 16
TURNED_TOKENS = 128
SUMMED_TOKENS = 64
PRODUCTS = {"num_warps": 4, "num_stages": 1}  # of the kernels that take one chunk: nothing to load ahead of


class _Call:
    """The inputs of one call as the kernels take them, and what prepare, turn and state made of them."""

    def __init__(self, q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size):  # fmt: skip
        B, T, H, P = v.shape
        G, N = q.shape[2:]
        R = angles.shape[3]
        _check_dims(P, N)
        self.q, self.k, self.v, self.z, self.angles = map(_rows, (q, k, v, z, angles))
        self.adt, self.dt, self.trap, self.doc_ids = (t.contiguous() for t in (adt, dt, trap, doc_ids))
        self.biases = q_bias.contiguous(), k_bias.contiguous()
        self.D, self.given = D.contiguous(), tuple(t.contiguous() for t in (theta, h, k_prev, v_prev))
        chunk = min(chunk_size, LONGEST[v.element_size()])
        L, C = max(16, triton.next_power_of_2(chunk)), triton.cdiv(T, chunk)
        self.sizes, self.grid = (T, C), (H, C, B)
        self.dims = {
            "H": H, "HEADS_A_GROUP": H // G, "CHUNK": chunk, "P": P, "N": N, "R": R,
            "L": L, "BLOCK_P": _tile(P), "BLOCK_N": _tile(N),
        }  # fmt: skip
        self.coefficients = v.new_empty((B, H, C, ROWS.value, L), dtype=torch.float32)
        self.spans = doc_ids.new_empty((B, C, 2, L))
        prepare_kernel[(triton.cdiv(H, PREPARED_HEADS), C, B)](
            self.adt, self.dt, self.trap, self.doc_ids, self.coefficients, self.spans, T, C,
            H=H, CHUNK=chunk, L=L, HEADS=PREPARED_HEADS,
        )  # fmt: skip
        # Cosines and sines of bf16 keys: fp16 holds three bits more than the keys, in the same bytes.
        turned = torch.float32 if v.dtype == torch.float32 else torch.float16
        self.rotations = v.new_empty((B, H, T, 2, R), dtype=turned)
        theta_final = v.new_empty(theta.shape, dtype=torch.float32)
        turn_kernel[(H, B)](
            self.angles, _strides(self.angles), self.dt, self.doc_ids, self.given[0], self.rotations, theta_final, T,
            H=H, R=R, BLOCK_R=_block(R), BLOCK_T=TURNED_TOKENS,
        )  # fmt: skip
        self.entering = v.new_empty((B, H, C, P, N))
        carried = [v.new_empty(t.shape, dtype=torch.float32) for t in (h, k_prev, v_prev)]
        state_kernel[(H, 1, B)](
            self.k, _strides(self.k), self.v, _strides(self.v), self.biases[1], self.dt, self.trap, self.rotations,
            self.coefficients, self.spans, *self.given[1:], self.entering, *carried, *self.sizes, **self.dims,
        )  # fmt: skip
        self.final = theta_final, *carried

    def chunk_inputs(self) -> tuple[Any, ...]:
        """q, k and v with their strides, as the kernels of one chunk begin."""
        return tuple(a for t in (self.q, self.k, self.v) for a in (t, _strides(t)))

    def chunk_tables(self) -> tuple[Tensor, ...]:
        return *self.biases, self.D, self.rotations, self.coefficients, self.spans


def _check_dims(P: int, N: int) -> None:
    if max(P, N) > 128:
        raise ValueError(f"mamba3_siso: head and state dim are at most 128 on CUDA, not {P} and {N}")


def _strides(t: Tensor) -> tuple[Any, ...]:
    """Of batch, token and head. The last two are constants of the kernel: whether a row is aligned hangs on them."""
    return t.stride(0), tl.constexpr(t.stride(1)), tl.constexpr(t.stride(2))


def _rows(t: Tensor) -> Tensor:
    """Any layout goes whose last dim is contiguous; others are copied."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _tile(dim: int) -> int:
    """As wide as a matrix product needs it."""
    return max(16, triton.next_power_of_2(dim))


def _block(R: int) -> int:
    return triton.next_power_of_2(max(R, 1))


def mamba3_siso_fwd_kernel(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of the op bumpgate::mamba3_siso_fwd: q, k (B,T,G,N), v, z (B,T,H,P) in one of fp32, fp16, bf16;
    P and N up to 128; the others in any of these, doc_ids (B,T) int32
    -> y (B,T,H,P) in v.dtype; theta (B,H,R), h (B,H,P,N), k_prev (B,H,N), v_prev (B,H,P) fp32. A chunk_size above
    64 (32 in fp32) is taken as that. Raises ValueError on a larger P or N."""
    call = _Call(*inputs)
    y = call.v.new_empty(call.v.shape)
    scan_kernel[call.grid](
        *call.chunk_inputs(), call.z, _strides(call.z), *call.chunk_tables(), call.entering, y,
        *call.sizes, **call.dims,
    )  # fmt: skip
    return y, *call.final


def mamba3_siso_bwd_kernel(*inputs: Any) -> list[Tensor]:
    """The forward's arguments, then the gradients of its five results -> gradients of the floating-point inputs,
    in their order, shapes and dtypes. Errors as the forward's."""
    *inputs, dy, dtheta, dh, dk_prev, dv_prev = inputs
    call = _Call(*inputs)
    (B, T, H, P), (G, N), R = call.v.shape, call.q.shape[2:], call.angles.shape[3]
    (_, C), L = call.sizes, call.dims["L"]
    dy, dtheta = _rows(dy), dtheta.contiguous()
    dh, dk_prev, dv_prev = (t.contiguous() for t in (dh, dk_prev, dv_prev))

    def fp32(*shape: int) -> Tensor:
        return call.v.new_empty(shape, dtype=torch.float32)

    dout, dz, dv = (call.v.new_empty(call.v.shape) for _ in range(3))
    gate_gradient_kernel[(H, triton.cdiv(T, SUMMED_TOKENS), B)](
        call.z, _strides(call.z), dy, _strides(dy), dout, dz, T, H=H, P=P, EXACT=call.v.dtype == torch.float32,
        TOKENS=SUMMED_TOKENS, BLOCK_P=call.dims["BLOCK_P"],
    )  # fmt: skip
    dqueries, dkeys = (call.v.new_empty((B, T, H, N)) for _ in range(2))
    dturns, sums, dD = fp32(B, H, T, R), fp32(B, H, C, SUMS.value, L), fp32(B * C, H)
    query_gradient_kernel[call.grid](
        *call.chunk_inputs(), dout, *call.chunk_tables(), call.entering, dz, dqueries, dD, dturns, sums,
        *call.sizes, **call.dims, **PRODUCTS,
    )  # fmt: skip
    leaving, carry = torch.empty_like(call.entering), fp32(B, H, C, R)
    through, lifted, dgiven = fp32(B, H, C, 1), fp32(B, H, 1, P), [fp32(*t.shape) for t in call.given]
    _, h_final, k_final, _ = call.final
    _, _, k_given, v_given = call.given
    state_gradient_kernel[(H, 1, B)](
        call.q, _strides(call.q), dout, call.biases[0], call.dt, call.trap, call.rotations, call.coefficients,
        call.spans, h_final, k_final, k_given, v_given, dtheta, dh, dk_prev, call.entering, leaving, carry, through,
        dgiven[1], dgiven[2], lifted, *call.sizes, **call.dims,
    )  # fmt: skip
    key_gradient_kernel[call.grid](
        *call.chunk_inputs(), dout, *call.chunk_tables(), leaving, dtheta, dk_prev, dv_prev, dkeys, dv, dturns, sums,
        *call.sizes, **call.dims, **PRODUCTS,
    )  # fmt: skip
    dq, dq_bias = _sum_heads(dqueries, G, inputs[6].dtype)
    dk, dk_bias = _sum_heads(dkeys, G, inputs[7].dtype)
    dadt, ddt, dtrap, dangles = (
        torch.empty_like(t) for t in (call.adt, call.dt, call.trap, call.angles.contiguous())
    )
    token_gradient_kernel[call.grid](
        call.angles, _strides(call.angles), call.dt, call.trap, call.doc_ids, call.spans, v_given, lifted, dturns, carry,
        through, sums, dangles, dadt, ddt, dtrap, dgiven[0], dgiven[3], *call.sizes, 1,
        H=H, CHUNK=call.dims["CHUNK"], P=P, R=R, L=L, BLOCK_P=call.dims["BLOCK_P"], BLOCK_R=_block(R),
    )  # fmt: skip
    dstate = [grad.to(t.dtype) for grad, t in zip(dgiven, call.given)]
    return [dq, dk, dv, dadt, ddt, dtrap, dq_bias, dk_bias, dangles, dD.sum(0).to(call.D.dtype), dz, *dstate]


def _sum_heads(dheads: Tensor, G: int, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dheads (B,T,H,N) -> the gradient of the shared q or k (B,T,G,N), and that of its bias (H,N)."""
    B, T, H, N = dheads.shape
    blocks = triton.cdiv(T, SUMMED_TOKENS)
    dgroups = dheads.new_empty((B, T, G, N))
    dbias = dheads.new_empty((B * blocks, H, N), dtype=torch.float32)
    head_sum_kernel[(G, blocks, B)](
        dheads, dgroups, dbias, T, H=H, HEADS_A_GROUP=H // G, N=N, TOKENS=SUMMED_TOKENS, BLOCK_N=_tile(N)
    )
    return dgroups, dbias.sum(0).to(bias_dtype)
