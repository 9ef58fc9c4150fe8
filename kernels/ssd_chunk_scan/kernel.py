"""ssd_chunk_scan in Triton: the forward walks a head's chunks in one program, the backward takes all chunks at once.

    prepare     one program per (chunk, heads of a row): the log decay summed along the chunk, anew from each
                document start, and the number of starts so far. Later kernels only subtract and compare these.
    forward     one program per (row, head): it walks the chunks with the state (P,N) in registers, so no state
                between chunks is ever written. Per chunk: scores, the masked product, state out, state in.
    states      one program per (row, head), run twice: forward in time for the state that enters each chunk,
                backward in time for the gradient of the state that leaves it. Both are kept in x.dtype.
    backward    one program per (chunk, group): scores once, then head after head, so that dB and dC of the group
                are register sums: no atomics, bit-repeatable. Everything (s,t)-shaped is held with s as the row:
                then no head needs a transposed matrix.

Two things keep documents apart to the last bit. A decay between two tokens is one difference of sums of their
own document. And the gradient of a log decay, the sum over the pairs s < t <= i that it lies between, is formed
by a product with a triangle of ones, not as a difference of row and column sums that only nearly cancel.

Rounding: sums, decays and states are fp32; the operands of matrix products are in x.dtype. fp32 inputs use the
FMA units, and fp64 for the summed log decays.

Bytes for B4 T4096 H112 P64 N64 G8 in bf16, 4.2 TB/s: forward x and y 470 MB, 0.11 ms (B and C, 34 MB each, are
read by 14 heads out of L2). Backward 2.2 GB, 0.53 ms: x and dy twice, both kinds of states (235 MB each) written
and read, dx. The floor without states is 0.7 GB; to keep them from memory would need one program a head again,
and then dB and dC would be written per head, which is more.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R = H/G heads a group, L tokens a tile, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-160 is zero in fp32: a token that forgets more than this must not cost its neighbours their digits.
FORGOTTEN = tl.constexpr(-160.0)


@triton.jit
def _dot(a, b, total=None):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _load(base, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A (rows,BLOCK) tile of a matrix of `count` rows and WIDTH columns; zeros outside."""
    column = tl.arange(0, BLOCK)[None, :]
    seen = rows[:, None] < count
    if BLOCK > WIDTH:
        seen = seen & (column < WIDTH)
    return tl.load(base + rows[:, None] * stride + column, mask=seen, other=0.0)


@triton.jit
def _store(base, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, tile):
    column = tl.arange(0, BLOCK)[None, :]
    seen = rows[:, None] < count
    if BLOCK > WIDTH:
        seen = seen & (column < WIDTH)
    tl.store(base + rows[:, None] * stride + column, tile, mask=seen)


@triton.jit
def _decay(later, earlier, connected):
    """exp of a difference of two summed log decays, 0 where a document start lies between them."""
    return tl.where(connected, tl.exp2(later - earlier).to(tl.float32), 0.0)


@triton.jit
def _ends(decays, steps, runs, head, row, L: tl.constexpr):
    """Of one chunk of one head, by token: summed log decay, dt, document number, decay since the chunk's start,
    decay until its end; and the decay across it all."""
    i = tl.arange(0, L)
    decay, step, run = tl.load(decays + head + i), tl.load(steps + head + i), tl.load(runs + row + i)
    last, last_run = tl.load(decays + head + L - 1), tl.load(runs + row + L - 1)
    return (
        decay,
        step,
        run,
        _decay(decay, 0.0, run == 0),
        _decay(last, decay, run == last_run),
        _decay(last, 0.0, last_run == 0),
    )


@triton.jit
def _join(sum_a, starts_a, sum_b, starts_b):
    """Sums that begin anew at each start."""
    return tl.where(starts_b > 0, sum_b, sum_a + sum_b), starts_a + starts_b


@triton.jit
def _prepare_kernel(
    dt, A, doc_ids, decays, steps, runs, T, H, C, CHUNK, L: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """dt (B,T,H), A (H,), doc_ids (B,T) -> decays (base 2) and steps (B,H,C,L), runs (B,C,L).

    Padding tokens have dt 0, so that they keep sum and document of the last token.
    """
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i, h = tl.arange(0, L), block * HEADS + tl.arange(0, HEADS)
    t = c * CHUNK + i
    real = (i < CHUNK) & (t < T)
    seen = real[:, None] & (h < H)[None, :]
    step = tl.load(dt + (b * T + t)[:, None] * H + h[None, :], mask=seen, other=0.0)
    step = step.to(tl.float32)
    rate = tl.load(A + h, mask=h < H, other=0.0).to(decays.dtype.element_ty) * LOG2E
    doc = tl.load(doc_ids + b * T + t, mask=real, other=0)
    before = tl.load(doc_ids + b * T + t - 1, mask=real & (t > 0), other=0)
    starts = (real & (t > 0) & (doc != before)).to(tl.int32)
    logs = tl.maximum(rate[None, :] * step, FORGOTTEN)
    decay, run = tl.associative_scan((logs, starts[:, None] + tl.zeros_like(h)[None, :]), 0, _join)
    at = ((b * H + h)[None, :] * C + c) * L + i[:, None]
    tl.store(decays + at, decay, mask=(h < H)[None, :])
    tl.store(steps + at, step, mask=(h < H)[None, :])
    # Every head has the same document numbers: the last to write leaves what the first wrote.
    tl.store(runs + (b * C + c) * L + i[:, None] + tl.zeros_like(h)[None, :], run, mask=(h == 0)[None, :])


@triton.jit
def _forward_kernel(
    x, key, query, D, decays, steps, runs, initial, y, final,
    x_stride, key_stride, query_stride, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head = b * H + h
    i, p = tl.arange(0, L), tl.arange(0, BLOCK_P)
    x += b * T * x_stride + h * P
    key += b * T * key_stride + h // R * N
    query += b * T * query_stride + h // R * N
    y += b * T * H * P + h * P
    skip = tl.load(D + h).to(tl.float32)
    state = _load(initial + head * P * N, p, P, N, N, BLOCK_N).to(tl.float32)
    for c in range(C):
        count = tl.minimum(CHUNK, T - c * CHUNK)
        value = _load(x, i, count, x_stride, P, BLOCK_P)
        b_tile = _load(key, i, count, key_stride, N, BLOCK_N)
        c_tile = _load(query, i, count, query_stride, N, BLOCK_N)
        decay, step, run, since, leaving, total = _ends(
            decays, steps, runs, (head * C + c) * L, (b * C + c) * L, L
        )
        scores = _dot(c_tile, tl.trans(b_tile))
        connected = (i[:, None] >= i[None, :]) & (run[:, None] == run[None, :])
        mixed = scores * _decay(decay[:, None], decay[None, :], connected) * step[None, :]
        out = since[:, None] * _dot(c_tile, tl.trans(state.to(value.dtype)))
        out = _dot(mixed.to(value.dtype), value, out)
        _store(y, i, count, H * P, P, BLOCK_P, out + skip * value)
        weighted = (value * (leaving * step)[:, None]).to(value.dtype)
        state = _dot(tl.trans(weighted), b_tile, total * state)
        x += CHUNK * x_stride
        key += CHUNK * key_stride
        query += CHUNK * query_stride
        y += CHUNK * H * P
    _store(final + head * P * N, p, P, N, N, BLOCK_N, state)


@triton.jit
def _states_kernel(
    rows, columns, decays, steps, runs, begin, states, end,
    row_stride, column_stride, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr, REVERSE: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """states (B,H,C,P,N): what enters each chunk of a sum of rows_t columns_t^T that starts as `begin`.

    Forward in time rows and columns are x and B. In reverse they are dy and C, what enters a chunk is the
    gradient of the state that leaves it, and `end` receives that of the initial state.
    """
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head = b * H + h
    i, p = tl.arange(0, L), tl.arange(0, BLOCK_P)
    rows += b * T * row_stride + h * P
    columns += b * T * column_stride + h // R * N
    state = _load(begin + head * P * N, p, P, N, N, BLOCK_N).to(tl.float32)
    for j in range(C):
        c = C - 1 - j if REVERSE else j
        start, count = (c * CHUNK).to(tl.int64), tl.minimum(CHUNK, T - c * CHUNK)
        _store(states + (head * C + c) * P * N, p, P, N, N, BLOCK_N, state)
        row = _load(rows + start * row_stride, i, count, row_stride, P, BLOCK_P)
        column = _load(columns + start * column_stride, i, count, column_stride, N, BLOCK_N)
        _, step, _, since, leaving, total = _ends(
            decays, steps, runs, (head * C + c) * L, (b * C + c) * L, L
        )
        weight = since if REVERSE else leaving * step
        state = _dot(tl.trans((row * weight[:, None]).to(row.dtype)), column, total * state)
    if REVERSE:
        _store(end + head * P * N, p, P, N, N, BLOCK_N, state)


@triton.jit
def _backward_kernel(
    x, key, query, dy, A, D, decays, steps, runs, states, dstates,
    dx, ddt, dkey, dquery, dA, dD,
    x_stride, key_stride, query_stride, dy_stride, B, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr,
    PART: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """PART heads of one group on one chunk. dkey and dquery (parts,B,T,G,N), dA and dD (B,C,H) are partial sums.

    s is the row of an (s,t) matrix: y_t takes scores[s,t] inside[s,t] dt_s x_s.
    """
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    part, group = tl.program_id(1) % tl.cdiv(R, PART), tl.program_id(1) // tl.cdiv(R, PART)
    i, p = tl.arange(0, L), tl.arange(0, BLOCK_P)
    count, token = tl.minimum(CHUNK, T - c * CHUNK), b * T + c * CHUNK
    b_tile = _load(key + token * key_stride + group * N, i, count, key_stride, N, BLOCK_N)
    c_tile = _load(query + token * query_stride + group * N, i, count, query_stride, N, BLOCK_N)
    scores = _dot(b_tile, tl.trans(c_tile))
    dscores = tl.zeros((L, L), tl.float32)
    db, dc = tl.zeros((L, BLOCK_N), tl.float32), tl.zeros((L, BLOCK_N), tl.float32)
    from_t = (i[:, None] >= i[None, :]).to(b_tile.dtype)
    for h in range(group * R + part * PART, group * R + tl.minimum(part * PART + PART, R)):
        head = b * H + h
        value = _load(x + token * x_stride + h * P, i, count, x_stride, P, BLOCK_P)
        dout = _load(dy + token * dy_stride + h * P, i, count, dy_stride, P, BLOCK_P)
        state = _load(states + (head * C + c) * P * N, p, P, N, N, BLOCK_N)
        dstate = _load(dstates + (head * C + c) * P * N, p, P, N, N, BLOCK_N)
        decay, step, run, since, leaving, total = _ends(
            decays, steps, runs, (head * C + c) * L, (b * C + c) * L, L
        )
        connected = (i[:, None] <= i[None, :]) & (run[:, None] == run[None, :])
        inside = _decay(decay[None, :], decay[:, None], connected)

        dmixed = _dot(value, tl.trans(dout))
        tl.store(dD + (b * C + c) * H + h, tl.sum(tl.where(i[:, None] == i[None, :], dmixed, 0.0)))
        dinside = dmixed * step[:, None] * inside
        dscores += dinside
        dweighted = leaving[:, None] * _dot(b_tile, tl.trans(dstate))
        dweighted = _dot((scores * inside).to(value.dtype), dout, dweighted)
        row = dx + token * H * P + h * P
        skip = tl.load(D + h).to(tl.float32)
        _store(row, i, count, H * P, P, BLOCK_P, step[:, None] * dweighted + skip * dout)

        read = since[:, None] * _dot(dout, state)
        sent = (leaving * step)[:, None] * _dot(value, dstate)
        dc += read
        db += sent
        # A log decay at t lies between s < t and each i >= t, the chunk's end, and (below) the entering state.
        pairs = _dot((dinside * scores).to(value.dtype), from_t) + tl.sum(sent * b_tile, 1)[:, None]
        entered = tl.sum(read * c_tile, 1)[:, None]
        dlog = tl.sum(tl.where(i[:, None] < i[None, :], pairs, entered), 0)
        dlog += total * tl.sum(state.to(tl.float32) * dstate)
        tl.store(dA + (b * C + c) * H + h, tl.sum(dlog * step))
        dstep = dlog * tl.load(A + h).to(tl.float32) + tl.sum(dweighted * value, 1)
        tl.store(ddt + (token + i) * H + h, dstep, mask=i < count)

    db = _dot(dscores.to(b_tile.dtype), c_tile, db)
    dc = _dot(tl.trans(dscores.to(b_tile.dtype)), b_tile, dc)
    row = ((part * B * T + token) * (H // R) + group) * N
    _store(dkey + row, i, count, H // R * N, N, BLOCK_N, db)
    _store(dquery + row, i, count, H // R * N, N, BLOCK_N, dc)


class Run(NamedTuple):
    """How Triton is to run a kernel."""

    warps: int
    stages: int


def _runs(dtype: torch.dtype) -> dict[str, Run]:
    """The forward wants 4 programs on an SM (H200: 132), or the 448 heads of B4 H112 take two rounds."""
    if dtype == torch.float32:
        return {"forward": Run(4, 1), "states": Run(4, 1), "backward": Run(8, 1)}
    return {"forward": Run(4, 2), "states": Run(4, 3), "backward": Run(8, 2)}


def _tokens(t: Tensor) -> Tensor:
    """(B,T,a,b) as it is if all that parts it from contiguous is the distance between tokens, else a copy."""
    _, T, a, b = t.shape
    token = t.stride(1)
    return t if t.stride() == (T * token, token, b, 1) and token >= a * b else t.contiguous()


class _Call:
    """The inputs of one call as the kernels take them."""

    def __init__(self, x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size):
        B, T, H, P = x.shape
        G, N = Bmat.shape[2:]
        if max(P, N) > 128:
            raise ValueError(f"ssd_chunk_scan: head and state dim are at most 128 on CUDA, not {P} and {N}")
        exact = x.dtype == torch.float32
        L = 32 if exact else 64
        self.chunk = min(chunk_size, L)
        self.C = triton.cdiv(T, self.chunk)
        self.x, self.key, self.query = _tokens(x), _tokens(Bmat), _tokens(Cmat)
        self.A, self.D, self.initial = A.contiguous(), D.contiguous(), initial_state.contiguous()
        self.dims = {"H": H, "R": H // G, "P": P, "N": N, "L": L}
        self.dims |= {f"BLOCK_{n}": max(16, triton.next_power_of_2(s)) for n, s in (("P", P), ("N", N))}
        self.sizes = T, self.C, self.chunk
        self.strides = self.x.stride(1), self.key.stride(1), self.query.stride(1)
        self.runs = _runs(x.dtype)
        decays = x.new_empty((B, H, self.C, L), dtype=torch.float64 if exact else torch.float32)
        steps = x.new_empty((B, H, self.C, L), dtype=torch.float32)
        runs = doc_ids.new_empty((B, self.C, L))
        _prepare_kernel[self.C, B, triton.cdiv(H, 16)](
            dt.contiguous(), self.A, doc_ids.contiguous(), decays, steps, runs, T, H, self.C, self.chunk,
            L=L, HEADS=16, num_warps=4,
        )  # fmt: skip
        self.decays = decays, steps, runs

    def options(self, kernel: str) -> dict[str, int]:
        run = self.runs[kernel]
        return self.dims | {"num_warps": run.warps, "num_stages": run.stages}


def ssd_chunk_scan_fwd_kernel(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bmat: Tensor,
    Cmat: Tensor,
    D: Tensor,
    doc_ids: Tensor,
    initial_state: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """x (B,T,H,P), Bmat and Cmat (B,T,G,N) fp32, fp16 or bf16, P and N up to 128; dt (B,T,H), A (H,), D (H,),
    initial_state (B,H,P,N) in any of these, doc_ids (B,T) int32 -> y (B,T,H,P) in x.dtype, final state
    (B,H,P,N) fp32. chunk_size counts up to the tile (64 tokens, 32 in fp32); a larger one is taken as the tile.
    Raises ValueError on P or N above 128."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    B, H = x.shape[0], x.shape[2]
    y, final = x.new_empty(x.shape), x.new_empty(initial_state.shape, dtype=torch.float32)
    _forward_kernel[(B * H,)](
        call.x, call.key, call.query, call.D, *call.decays, call.initial, y, final,
        *call.strides, *call.sizes, **call.options("forward"),
    )  # fmt: skip
    return y, final


def ssd_chunk_scan_bwd_kernel(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bmat: Tensor,
    Cmat: Tensor,
    D: Tensor,
    doc_ids: Tensor,
    initial_state: Tensor,
    chunk_size: int,
    dy: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, Bmat, Cmat, D, initial_state from those of the forward's results."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    (B, T, H, P), (G, N) = x.shape, Bmat.shape[2:]
    dy, dfinal = _tokens(dy), dfinal.contiguous()
    x_stride, key_stride, query_stride = call.strides
    dinitial = torch.empty_like(call.initial)
    states, dstates = (x.new_empty((B, H, call.C, P, N)) for _ in range(2))
    for rows, columns, begin, out, strides, reverse in (
        (call.x, call.key, call.initial, states, (x_stride, key_stride), False),
        (dy, call.query, dfinal, dstates, (dy.stride(1), query_stride), True),
    ):
        _states_kernel[(B * H,)](
            rows, columns, *call.decays, begin, out, dinitial, *strides, *call.sizes, REVERSE=reverse,
            **call.options("states"),
        )  # fmt: skip

    part, parts = _parts(H // G, B * G * call.C)
    summed = x.dtype if parts == 1 else torch.float32
    dkeys, dqueries = (x.new_empty((parts, B, T, G, N), dtype=summed) for _ in range(2))
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dA, dD = x.new_empty((2, B * call.C, H), dtype=torch.float32)
    _backward_kernel[call.C, G * parts, B](
        call.x, call.key, call.query, dy, call.A, call.D, *call.decays, states, dstates,
        dx, ddt, dkeys, dqueries, dA, dD, *call.strides, dy.stride(1), B, *call.sizes,
        PART=part, **call.options("backward"),
    )  # fmt: skip
    dB, dC = (t[0] if parts == 1 else t.sum(0).to(x.dtype) for t in (dkeys, dqueries))
    return dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD.sum(0).to(D.dtype), dinitial


def _parts(R: int, programs: int) -> tuple[int, int]:
    """Heads a program takes of a group, and programs a group: few groups and chunks would leave SMs idle."""
    parts = max(1, min(R, 512 // programs))
    part = triton.cdiv(R, parts)
    return part, triton.cdiv(R, part)
