"""ssd_chunk_scan in Triton: launches the kernels of kernel_forward.py and kernel_backward.py.

The forward processes a head's chunks one after the other, the backward all in parallel:
    prepare         one program per (chunk, heads of a row): decays, the log decay (base 2) summed along the chunk,
                    restarting at each document start; gates, per token: dt, the decay since the chunk's start, and
                    that until its end; spans, per token: where in the chunk its document begins and ends. No later
                    kernel scans.
    forward         one program per (row, head). The state (P,N) stays in registers from the first chunk to the
                    last and is not written. A chunk takes four matrix products: scores, the output from the state,
                    the output from the chunk itself (with D on the diagonal), and the new state.
    states          one program per (row, head), run twice: forward in time for the state that enters each chunk,
                    and backward in time for the gradient of the state that leaves it. Both are stored in x.dtype.
    head_gradient   one program per (chunk, head): dx, d dt, and the contributions to dA and dD. No loop.
    group_gradient  one program per (chunk, group, 64 columns of N). It loops over the group's heads, so that dB and
                    dC are register sums: no atomics, bitwise deterministic.
The last two both recompute dy x^T and the decays, and both read x, dy and the states. One kernel would hold the three
sums of a group together with the tiles of a head: 700 to 1,500 bytes too many for 255 registers per thread.

Documents are bitwise independent. A decay between two tokens is one difference of sums within their document. The
gradient of a log decay is the sum over the pairs s < t <= i that it lies between, computed as a product with a
triangle of ones: a difference of row sums and column sums would not cancel exactly. d dt = ... + x . d(dt x) is
computed from the same pairs.

Rounding: sums, decays and states are fp32, operands of products are x.dtype, also decayed scores, dt x and states.
fp32 inputs use the FMA units, and fp64 for decays. In fp16 a state above 65504 overflows.

Bytes for B4 T4096 H112 P64 N64 G8 in bf16: forward x and y, 470 MB, 0.11 ms at 4.2 TB/s (B and C, 34 MB each, come
to 14 heads out of L2). Backward 3.1 GB, 0.73 ms: x and dy three times, states of both kinds (235 MB each) written
once and read twice, dx. Its floor is 0.8 GB. With N128 G1 the states are twice as large: 4.5 GB, 1.07 ms. A backward
that does not store the states would be one program per head and write dB and dC per head, which is as much traffic.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R = H/G heads per group, L tokens per tile, C chunks of
CHUNK <= L tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.ssd_chunk_scan.kernel_backward import group_gradient_kernel, head_gradient_kernel
from kernels.ssd_chunk_scan.kernel_forward import forward_kernel, prepare_kernel, states_kernel

PREPARED_HEADS = 16
ENOUGH_PROGRAMS = 512
SUMMED_COLUMNS = 64


class Run(NamedTuple):
    """Triton launch options of a kernel."""

    warps: int
    stages: int


def _runs(P: int, N: int, dtype: torch.dtype) -> tuple[int, dict[str, Run]]:
    """Tokens per tile, and the launch options of each kernel.

    Four warps cover one wgmma (64 rows); in a kernel that chains products, four more would repeat the same rows.
    """
    if dtype == torch.float32:
        return 16, dict.fromkeys(("forward", "states", "head_gradient", "group_gradient"), Run(8, 1))
    narrow = max(P, N) <= 64
    return 64, {
        "forward": Run(4, 3 if narrow else 2),
        "states": Run(4, 3) if narrow else Run(8, 2),
        "head_gradient": Run(4, 1),
        "group_gradient": Run(4, 3),
    }


def _tokens(t: Tensor) -> tuple[Tensor, int]:
    """Return (B,T,a,b) and its token stride; copied if any other stride is not contiguous."""
    B, T, a, b = t.shape
    token = t.stride(1)
    if t.stride()[2:] == (b, 1) and (B == 1 or t.stride(0) == T * token):
        return t, token
    return t.contiguous(), a * b


class _Call:
    """Inputs of one call in the layout of the kernels."""

    def __init__(self, x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size):
        B, T, H, P = x.shape
        G, N = Bmat.shape[2:]
        if max(P, N) > 128:
            raise ValueError(f"ssd_chunk_scan: head and state dim are at most 128 on CUDA, not {P} and {N}")
        L, self.runs = _runs(P, N, x.dtype)
        chunk = min(chunk_size, L)
        C = triton.cdiv(T, chunk)
        (self.x, x_stride), (self.key, key_stride), (self.query, query_stride) = map(_tokens, (x, Bmat, Cmat))
        self.A, self.D, self.initial = A.contiguous(), D.contiguous(), initial_state.contiguous()
        self.sizes = T, C, chunk
        self.strides = {"x_stride": x_stride, "key_stride": key_stride, "query_stride": query_stride}
        blocks = {f"BLOCK_{n}": max(16, triton.next_power_of_2(s)) for n, s in (("P", P), ("N", N))}
        self.dims = {"H": H, "R": H // G, "P": P, "N": N, "L": L, **blocks}
        exact = torch.float64 if x.dtype == torch.float32 else torch.float32
        self.decays = x.new_empty((B, H, C, L), dtype=exact)
        self.gates = x.new_empty((B, H, C, 3, L), dtype=torch.float32)
        self.spans = doc_ids.new_empty((B, C, 2, L))
        prepare_kernel[C, B, triton.cdiv(H, PREPARED_HEADS)](
            dt.contiguous(), self.A, doc_ids.contiguous(), self.decays, self.gates, self.spans, T, H, C, chunk,
            L=L, HEADS=PREPARED_HEADS, num_warps=4,
        )  # fmt: skip

    def options(self, kernel: str) -> dict[str, Any]:
        return {**self.dims, "num_warps": self.runs[kernel].warps, "num_stages": self.runs[kernel].stages}


def ssd_chunk_scan_fwd_kernel(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (B,T,H,P), Bmat and Cmat (B,T,G,N) fp32, fp16 or bf16, P and N up to 128; dt (B,T,H), A (H,), D (H,),
    initial_state (B,H,P,N) in any of these; doc_ids (B,T) int32 -> y (B,T,H,P) in x.dtype, final state
    (B,H,P,N) fp32. chunk_size is clamped to the tile (64 tokens, 16 in fp32).
    Raises ValueError on P or N above 128."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    B, H = x.shape[0], x.shape[2]
    y, final = x.new_empty(x.shape), x.new_empty(initial_state.shape, dtype=torch.float32)
    forward_kernel[(B * H,)](
        call.x, call.key, call.query, call.D, call.decays, call.gates, call.spans, call.initial, y, final,
        *call.sizes, **call.strides, **call.options("forward"),
    )  # fmt: skip
    return y, final


def ssd_chunk_scan_bwd_kernel(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor, chunk_size: int, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, A, Bmat, Cmat, D, initial_state from the gradients of y (B,T,H,P) and the final state."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    (B, T, H, P), (G, N), C = x.shape, Bmat.shape[2:], call.sizes[1]
    dy, dfinal = dy.contiguous(), dfinal.contiguous()
    dinitial = torch.empty_like(call.initial)
    states, dstates = (x.new_empty((B, H, C, P, N)) for _ in range(2))
    for rows, row_stride, columns, column_stride, begin, out, reverse in (
        (call.x, call.strides["x_stride"], call.key, call.strides["key_stride"], call.initial, states, False),
        (dy, H * P, call.query, call.strides["query_stride"], dfinal, dstates, True),
    ):
        states_kernel[(B * H,)](
            rows, columns, call.gates, begin, out, dinitial, *call.sizes, row_stride=row_stride,
            column_stride=column_stride, REVERSE=reverse, **call.options("states"),
        )  # fmt: skip

    columns = min(call.dims["BLOCK_N"], SUMMED_COLUMNS)
    blocks = triton.cdiv(N, columns)
    part, parts = _parts(H // G, B * G * C * blocks)
    summed = x.dtype if parts == 1 else torch.float32
    dkeys, dqueries = (x.new_empty((parts, B, T, G, N), dtype=summed) for _ in range(2))
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dA, dD = (x.new_empty((B * C, H), dtype=torch.float32) for _ in range(2))
    head_gradient_kernel[H, C, B](
        call.x, call.key, call.query, dy, call.A, call.D, call.decays, call.gates, call.spans, states, dstates,
        dx, ddt, dA, dD, *call.sizes, **call.strides, **call.options("head_gradient"),
    )  # fmt: skip
    group_gradient_kernel[C, G * parts * blocks, B](
        call.x, call.key, call.query, dy, call.decays, call.gates, call.spans, states, dstates,
        dkeys, dqueries, B, *call.sizes, PART=part, **call.strides,
        **call.options("group_gradient") | {"BLOCK_N": columns},
    )  # fmt: skip
    dB, dC = (t[0] if parts == 1 else t.sum(0).to(x.dtype) for t in (dkeys, dqueries))
    return dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD.sum(0).to(D.dtype), dinitial


def _parts(R: int, programs: int) -> tuple[int, int]:
    """Heads per program, and programs per group: with few groups and chunks, SMs would otherwise be idle."""
    part = triton.cdiv(R, max(1, min(R, ENOUGH_PROGRAMS // programs)))
    return part, triton.cdiv(R, part)
