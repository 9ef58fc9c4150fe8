"""mamba3_siso in Triton: launches the kernels of kernel_forward.py and kernel_backward.py.

Forward:
    prepare     per token: decays summed along the chunk, weights, document spans.
    turn_sum    total rotation of each block of tokens, which applies to all later blocks.
    turn_start  sums these to the rotation at the start of each block.
    turn        adds the bias to queries and keys of each head, rotates them and writes them once for later kernels.
    scan        one program per (row, head) loops over the chunks. The state stays in registers and is not written.
Backward: the first four again, then
    state       the state that enters each chunk; state_gradient, in reverse, the gradient of the state that leaves it.
    chunk       each chunk independently: all its products, ten and one for the log decays.
    token       the remaining gradients per token: angles, adt, dt, trap.
    head_sum    rotates the gradients of queries and keys back and sums them over the heads of a group.
Every sum over programs is done by one program in a fixed order: bitwise deterministic.

Rounding: sums, angles and states are fp32 or better. Operands of products are v.dtype, also rotated queries and keys,
weighted values, scores and the states between chunks of the backward. fp32 inputs use the FMA units.

Bytes for B4 T4096 H112 P64 N64 G8 R16 in bf16, a (B,T,H,64) tensor being 235 MB: forward 1.8 GB, 0.43 ms at 4.2 TB/s
(v, z, y; queries and keys written and read), with a floor of 0.8 GB. Backward 6.4 GB, 1.5 ms: in addition the
states and their gradients, dqueries and dkeys, each written and read.
B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.hopper import TRITON
from kernels.mamba3_siso.kernel_backward import (
    SUMS,
    chunk_gradient_kernel,
    head_sum_kernel,
    state_gradient_kernel,
    state_kernel,
    token_gradient_kernel,
)
from kernels.mamba3_siso.kernel_forward import (
    ROWS,
    prepare_kernel,
    scan_kernel,
    turn_kernel,
    turn_start_kernel,
    turn_sum_kernel,
)

PREPARED_HEADS = 16
SUMMED_TOKENS = 64
ENOUGH_PROGRAMS = 1024


class Run(NamedTuple):
    """Triton launch options of a kernel."""

    warps: int
    stages: int = 1
    registers: int | None = None  # limit per thread, for more programs on an SM; None: the compiler's choice


NARROW = {  # P and N up to 64; four warps are one wgmma high (64 rows)
    "turn_sum": Run(1), "turn_start": Run(4), "turn": Run(1, 1, 96), "scan": Run(4, 3), "state": Run(4, 3),
    "state_gradient": Run(4, 2, 168), "chunk": Run(4, 1, 168), "token": Run(2), "head_sum": Run(2),
}  # fmt: skip
WIDE = NARROW | {
    "turn": Run(1, 1, 168), "scan": Run(4, 2), "state": Run(8, 2), "state_gradient": Run(8, 2, 128), "chunk": Run(4),
    "head_sum": Run(4),
}  # fmt: skip
EXACT = {name: Run(8) for name in NARROW}  # fp32
TURNED_TOKENS, TURNED_BLOCKS = 16, 2
if TRITON < (3, 9):  # exchanges values within a warp by long code, which spills: larger blocks, more warps
    TURNED_TOKENS, TURNED_BLOCKS = 64, 1
    NARROW, WIDE = (runs | {"turn_sum": Run(2), "turn": Run(4)} for runs in (NARROW, WIDE))


class _Call:
    """Inputs of one call in the layout of the kernels, and the results of prepare and turn."""

    def __init__(
        self, q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size,
        save_rotation,
    ):  # fmt: skip
        B, T, H, P = v.shape
        G, N = q.shape[2:]
        R = angles.shape[3]
        if max(P, N) > 128:
            raise ValueError(f"mamba3_siso: head and state dim are at most 128 on CUDA, not {P} and {N}")
        self.q, self.k, self.v, self.z, self.angles = map(_rows, (q, k, v, z, angles))
        self.adt, self.dt, self.trap, self.doc_ids = (t.contiguous() for t in (adt, dt, trap, doc_ids))
        self.q_bias, self.k_bias, self.D = (t.contiguous() for t in (q_bias, k_bias, D))
        self.given = tuple(t.contiguous() for t in (theta, h, k_prev, v_prev))
        exact = v.dtype == torch.float32
        self.runs = EXACT if exact else NARROW if max(P, N) <= 64 else WIDE
        L = 16 if exact else 64
        chunk = min(chunk_size, L)
        C = triton.cdiv(T, chunk)
        self.sizes = T, C
        self.heads = {"H": H, "HEADS_A_GROUP": H // G}
        self.tiles = {"H": H, "CHUNK": chunk, "P": P, "N": N, "L": L}
        self.tiles |= {"BLOCK_P": _tile(P), "BLOCK_N": _tile(N)}
        self.columns = {"BLOCK_R": _block(R), "BLOCK_REST": _block(N - 2 * R)}
        self.coefficients = self.fp32(B, H, C, ROWS.value, L)
        self.spans = doc_ids.new_empty((B, C, 2, L))
        prepare_kernel[triton.cdiv(H, PREPARED_HEADS), C, B](
            self.adt, self.dt, self.trap, self.doc_ids, self.coefficients, self.spans, T, C,
            H=H, CHUNK=chunk, L=L, HEADS=PREPARED_HEADS, WIDE=tl.float64 if exact else tl.float32, num_warps=4,
        )  # fmt: skip

        blocks = triton.cdiv(T, TURNED_TOKENS)
        block_turns, block_starts = (doc_ids.new_empty(s) for s in ((B, H, 1 + blocks, R), (B, 1 + blocks)))
        turning = self.angles, _strides(self.angles), self.dt, self.doc_ids
        turn_sum_kernel[H, triton.cdiv(blocks, TURNED_BLOCKS), B](
            *turning, self.given[0], block_turns, block_starts, T, blocks,
            H=H, R=R, BLOCK_R=_block(R), BLOCK_T=TURNED_TOKENS, BLOCKS=TURNED_BLOCKS, **self.run("turn_sum"),
        )  # fmt: skip
        turn_start_kernel[H, B](
            block_turns, block_starts, blocks, H=H, R=R, BLOCK_R=_block(R), **self.run("turn_start")
        )
        self.queries, self.keys = (v.new_empty((B, H, T, N)) for _ in range(2))
        self.turns = doc_ids.new_empty((B, H, T, R) if save_rotation else 0)
        self.theta_final, self.k_final = self.fp32(B, H, R), self.fp32(B, H, N)
        turn_kernel[H, blocks, B](
            self.q, _strides(self.q), self.k, _strides(self.k), self.q_bias, self.k_bias, *turning,
            block_turns,
            self.queries, self.keys, self.turns, self.theta_final, self.k_final, T,
            N=N, R=R, KEEP=save_rotation, BLOCK_T=TURNED_TOKENS, **self.heads, **self.columns, **self.run("turn"),
        )  # fmt: skip

    def fp32(self, *shape: int) -> Tensor:
        return self.v.new_empty(shape, dtype=torch.float32)

    def run(self, kernel: str) -> dict[str, int]:
        run = self.runs[kernel]
        limit = {} if run.registers is None else {"maxnreg": run.registers}
        return {"num_warps": run.warps, "num_stages": run.stages, **limit}


def _strides(t: Tensor) -> tuple[Any, ...]:
    """Strides of batch, token and head. The last two are constexpr, because the alignment of a row depends on them."""
    return t.stride(0), tl.constexpr(t.stride(1)), tl.constexpr(t.stride(2))


def _rows(t: Tensor) -> Tensor:
    """Return t itself if its last dim is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _tile(dim: int) -> int:
    """Tile width for a dim, as required by a matrix product."""
    return max(16, triton.next_power_of_2(dim))


def _block(dim: int) -> int:
    return triton.next_power_of_2(max(dim, 1))


def mamba3_siso_fwd_kernel(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Implement bumpgate::mamba3_siso_fwd: q, k (B,T,G,N), v, z (B,T,H,P) in one of fp32, fp16, bf16;
    P and N up to 128; the others in any of these, doc_ids (B,T) int32
    -> y (B,T,H,P) in v.dtype; theta (B,H,R), h (B,H,P,N), k_prev (B,H,N), v_prev (B,H,P) fp32. chunk_size is
    clamped to 64 (16 in fp32). Raises ValueError on a larger P or N."""
    call = _Call(*inputs, save_rotation=False)
    B, H = call.v.shape[0], call.v.shape[2]
    y, h_final, v_final = call.v.new_empty(call.v.shape), *(call.fp32(*t.shape) for t in call.given[1::2])
    scan_kernel[H, B](
        call.queries, call.keys, call.v, _strides(call.v), call.z, _strides(call.z), call.D,
        call.coefficients, call.spans, call.dt, call.trap, *call.given[1:], y, h_final, v_final,
        *call.sizes, **call.tiles, **call.run("scan"),
    )  # fmt: skip
    return y, call.theta_final, h_final, call.k_final, v_final


def mamba3_siso_bwd_kernel(*inputs: Any) -> list[Tensor]:
    """The forward's arguments, then the gradients of its five results -> gradients of the floating-point inputs,
    in their order, shapes and dtypes. Errors as in the forward."""
    *inputs, dy, dtheta_final, dh_final, dk_final, dv_final = inputs
    call = _Call(*inputs, save_rotation=True)
    (B, _, H, P), N, R = call.v.shape, call.q.shape[3], call.angles.shape[3]
    (_, C), L = call.sizes, call.tiles["L"]
    _, *given = call.given
    dy = _rows(dy)
    gated = call.z, _strides(call.z), dy, _strides(dy)
    dtheta_final, dh_final, dk_final, dv_final = (
        t.contiguous() for t in (dtheta_final, dh_final, dk_final, dv_final)
    )
    entering, leaving = (call.v.new_empty((B, H, C, P, N)) for _ in range(2))
    h_final = call.fp32(B, H, P, N)
    state_kernel[H, B](
        call.keys, call.v, _strides(call.v), call.coefficients, call.dt, call.trap, *given, entering, h_final,
        *call.sizes, **call.tiles, **call.run("state"),
    )  # fmt: skip
    dgiven = [call.fp32(*t.shape) for t in call.given]
    lifted, carry = call.fp32(B, H, P), call.fp32(B, H, C, R)
    state_gradient_kernel[H, B](
        call.queries, *gated, call.coefficients, call.spans, call.dt, call.trap, h_final, call.k_final, *given[1:],
        dtheta_final, dh_final, dk_final, leaving, carry, dgiven[1], dgiven[2], lifted,
        *call.sizes, R=R, **call.tiles, **call.run("state_gradient"),
    )  # fmt: skip
    dqueries, dkeys = (torch.empty_like(call.queries) for _ in range(2))
    dv, dz = (call.v.new_empty(call.v.shape) for _ in range(2))
    dD, sums, borders = call.fp32(B * C, H), call.fp32(B, H, C, SUMS.value, L), call.fp32(B, H, C, R)
    chunk_gradient_kernel[H, C, B](
        call.queries, call.keys, call.v, _strides(call.v), *gated, call.D, call.coefficients, call.spans,
        entering, leaving, dk_final, dv_final, dqueries, dkeys, dv, dz, dD, sums, borders,
        *call.sizes, R=R, **call.tiles, **call.run("chunk"),
    )  # fmt: skip
    per_token = (call.angles.contiguous(), call.adt, call.dt, call.trap)
    dangles, dadt, ddt, dtrap = (torch.empty_like(t) for t in per_token)
    tiles = {name: call.tiles[name] for name in ("H", "CHUNK", "P", "N", "L", "BLOCK_P")}
    token_gradient_kernel[H, C, B](
        call.queries, call.keys, dqueries, dkeys, call.angles, _strides(call.angles), call.dt, call.trap,
        call.doc_ids, call.spans, given[2], lifted, dtheta_final, sums, carry, borders,
        dangles, dadt, ddt, dtrap, dgiven[0], dgiven[3],
        *call.sizes, R=R, BLOCK_R=_block(R), **tiles, **call.run("token"),
    )  # fmt: skip
    dq, dq_bias = _sum_heads(call, dqueries, call.q_bias.dtype)
    dk, dk_bias = _sum_heads(call, dkeys, call.k_bias.dtype)
    dstate = [grad.to(t.dtype) for grad, t in zip(dgiven, call.given)]
    return [dq, dk, dv, dadt, ddt, dtrap, dq_bias, dk_bias, dangles, dD.sum(0).to(call.D.dtype), dz, *dstate]


def _sum_heads(call: _Call, dheads: Tensor, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradient of rotated queries or keys (B,H,T,N) -> gradients of q or k (B,T,G,N) and of its bias (H,N)."""
    (B, H, T, N), G, R = dheads.shape, call.q.shape[2], call.angles.shape[3]
    blocks = triton.cdiv(T, SUMMED_TOKENS)
    part, parts = _parts(H // G, B * G * blocks)
    dgroups = dheads.new_empty((parts, B, T, G, N), dtype=dheads.dtype if parts == 1 else torch.float32)
    dbias = call.fp32(B * blocks, H, N)
    head_sum_kernel[blocks, G * parts, B](
        dheads, call.turns, dgroups, dbias, B, T, PART=part, N=N, R=R, BLOCK_T=SUMMED_TOKENS,
        **call.heads, **call.columns, **call.run("head_sum"),
    )  # fmt: skip
    return dgroups[0] if parts == 1 else dgroups.sum(0).to(dheads.dtype), dbias.sum(0).to(bias_dtype)


def _parts(heads: int, programs: int) -> tuple[int, int]:
    """Heads per program, and programs per group: with few groups and chunks, SMs would otherwise be idle."""
    part = triton.cdiv(heads, max(1, min(heads, ENOUGH_PROGRAMS // programs)))
    return part, triton.cdiv(heads, part)
