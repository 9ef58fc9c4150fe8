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
def _load_state(base, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    p, n = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_P == P and BLOCK_N == N:
        return tl.load(base + p * N + n)
    return tl.load(base + p * N + n, mask=(p < P) & (n < N), other=0.0)


@triton.jit
def _store_state(base, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, state):
    p, n = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_P == P and BLOCK_N == N:
        tl.store(base + p * N + n, state)
    else:
        tl.store(base + p * N + n, state, mask=(p < P) & (n < N))


@triton.jit
def _inside(later, earlier, connected):
    """Decay from after token s to token t, 0 where s > t or a document begins in between."""
    return tl.where(connected, tl.exp2(later - earlier).to(tl.float32), 0.0)


@triton.jit
def _trace(square, i):
    return tl.sum(tl.where(i[:, None] == i[None, :], square, 0.0))


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _join(sum_a, first_a, sum_b, first_b):
    """Sums that begin anew at each document start; the last start so far."""
    return tl.where(first_b >= 0, sum_b, sum_a + sum_b), tl.maximum(first_a, first_b)


@triton.jit
def _prepare_kernel(
    dt, A, doc_ids, decays, gates, spans, T, H, C, CHUNK, L: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """dt (B,T,H), A (H,), doc_ids (B,T) -> what the module's docstring says of decays, gates and spans.

    Padding tokens have dt 0, so that they keep sum and document of the last token.
    """
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i, h = tl.arange(0, L), block * HEADS + tl.arange(0, HEADS)
    t = c * CHUNK + i
    real = (i < CHUNK) & (t < T)
    step = tl.load(dt + (b * T + t)[:, None] * H + h[None, :], mask=real[:, None] & (h < H)[None, :], other=0.0)
    step = step.to(tl.float32)
    rate = tl.load(A + h, mask=h < H, other=0.0).to(decays.dtype.element_ty) * LOG2E
    doc = tl.load(doc_ids + b * T + t, mask=real, other=0)
    before = tl.load(doc_ids + b * T + t - 1, mask=real & (t > 0), other=0)
    starts = real & (t > 0) & (doc != before)
    # The start of the next document is looked up one token ahead, for it is not yet part of this token's own.
    after = tl.load(doc_ids + b * T + t + 1, mask=(i + 1 < CHUNK) & (t + 1 < T), other=0)
    ends = (i + 1 < CHUNK) & (t + 1 < T) & (doc != after)
    until = tl.associative_scan(tl.where(ends, i + 1, L), 0, _least, reverse=True)[:, None] + tl.zeros_like(h)[None, :]
    first = tl.where(starts, i, -1)[:, None] + tl.zeros_like(h)[None, :]
    decay, first = tl.associative_scan((tl.maximum(rate[None, :] * step, FORGOTTEN), first), 0, _join)
    last = tl.sum(tl.where(i[:, None] == L - 1, decay, 0.0), 0)[None, :]
    last_first = tl.max(first, 0)[None, :]
    since = tl.where(first < 0, tl.exp2(decay).to(tl.float32), 0.0)
    leaving = tl.where(i[:, None] >= last_first, tl.exp2(last - decay).to(tl.float32), 0.0)
    chunk = ((b * H + h) * C + c)[None, :] * L
    own = (h < H)[None, :]
    tl.store(decays + chunk + i[:, None], decay, mask=own)
    tl.store(gates + chunk * 3 + i[:, None], step, mask=own)
    tl.store(gates + chunk * 3 + L + i[:, None], since, mask=own)
    tl.store(gates + chunk * 3 + 2 * L + i[:, None], leaving, mask=own)
    span = spans + (b * C + c) * 2 * L + i[:, None] + tl.zeros_like(h)[None, :]
    tl.store(span, first, mask=(h == 0)[None, :])
    tl.store(span + L, until, mask=(h == 0)[None, :])


@triton.jit
def _forward_kernel(
    x, key, query, D, decays, gates, spans, initial, y, final,
    x_stride, key_stride, query_stride, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head = b * H + h
    i = tl.arange(0, L)
    x += b * T * x_stride + h * P
    key += b * T * key_stride + h // R * N
    query += b * T * query_stride + h // R * N
    y += b * T * H * P + h * P
    decays += head * C * L
    gates += head * C * L * 3
    spans += b * C * L * 2
    skip = tl.load(D + h).to(tl.float32)
    state = _load_state(initial + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for c in range(C):
        count = tl.minimum(CHUNK, T - c * CHUNK)
        c_tile = _load(query, i, count, query_stride, N, BLOCK_N)
        out = tl.load(gates + L + i)[:, None] * _dot(c_tile, tl.trans(state.to(c_tile.dtype)))
        b_tile = _load(key, i, count, key_stride, N, BLOCK_N)
        decay, first, step = tl.load(decays + i), tl.load(spans + i), tl.load(gates + i)
        inside = _inside(decay[:, None], decay[None, :], (i[None, :] <= i[:, None]) & (i[None, :] >= first[:, None]))
        mixed = _dot(c_tile, tl.trans(b_tile)) * inside * step[None, :]
        value = _load(x, i, count, x_stride, P, BLOCK_P)
        out = _dot(mixed.to(value.dtype), value, out)
        _store(y, i, count, H * P, P, BLOCK_P, out + skip * value)
        weight = step * tl.load(gates + 2 * L + i)
        weighted = (value * weight[:, None]).to(value.dtype)
        state = _dot(tl.trans(weighted), b_tile, tl.load(gates + 2 * L - 1) * state)
        x += CHUNK * x_stride
        key += CHUNK * key_stride
        query += CHUNK * query_stride
        y += CHUNK * H * P
        decays += L
        gates += 3 * L
        spans += 2 * L
    _store_state(final + head * P * N, P, N, BLOCK_P, BLOCK_N, state)


@triton.jit
def _states_kernel(
    rows, columns, gates, begin, states, end,
    row_stride, column_stride, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr, REVERSE: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """states (B,H,C,P,N): what enters each chunk of a sum of rows_t columns_t^T that starts as `begin`.

    Forward in time rows and columns are x and B. In reverse they are dy and C, what enters a chunk is the
    gradient of the state that leaves it, and `end` receives that of the initial state.
    """
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head = b * H + h
    i = tl.arange(0, L)
    rows += b * T * row_stride + h * P
    columns += b * T * column_stride + h // R * N
    state = _load_state(begin + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for j in range(C):
        c = C - 1 - j if REVERSE else j
        start, count = (c * CHUNK).to(tl.int64), tl.minimum(CHUNK, T - c * CHUNK)
        _store_state(states + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N, state)
        row = _load(rows + start * row_stride, i, count, row_stride, P, BLOCK_P)
        column = _load(columns + start * column_stride, i, count, column_stride, N, BLOCK_N)
        gate = gates + (head * C + c) * 3 * L
        if REVERSE:
            weight = tl.load(gate + L + i)
        else:
            weight = tl.load(gate + i) * tl.load(gate + 2 * L + i)
        weighted = (row * weight[:, None]).to(row.dtype)
        state = _dot(tl.trans(weighted), column, tl.load(gate + 2 * L - 1) * state)
    if REVERSE:
        _store_state(end + head * P * N, P, N, BLOCK_P, BLOCK_N, state)


@triton.jit
def _backward_kernel(
    x, key, query, dy, A, D, decays, gates, spans, states, dstates,
    dx, ddt, dkey, dquery, dA, dD,
    x_stride, key_stride, query_stride, B, T, C, CHUNK, H: tl.constexpr, R: tl.constexpr,
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
    dscores = tl.zeros((L, L), tl.float32)
    db, dc = tl.zeros((L, BLOCK_N), tl.float32), tl.zeros((L, BLOCK_N), tl.float32)
    from_t = (i[:, None] >= i[None, :]).to(b_tile.dtype)
    for h in range(group * R + part * PART, group * R + tl.minimum(part * PART + PART, R)):
        head = b * H + h
        decay, until = tl.load(decays + (head * C + c) * L + i), tl.load(spans + ((b * C + c) * 2 + 1) * L + i)
        gate = gates + (head * C + c) * 3 * L
        step, since, leaving = tl.load(gate + i), tl.load(gate + L + i), tl.load(gate + 2 * L + i)
        state = _load_state(states + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N)
        dstate = _load_state(dstates + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N)
        value = _load(x + token * x_stride + h * P, i, count, x_stride, P, BLOCK_P)
        dout = _load(dy + token * H * P + h * P, i, count, H * P, P, BLOCK_P)

        inside = _inside(decay[None, :], decay[:, None], (i[None, :] >= i[:, None]) & (i[None, :] < until[:, None]))
        dmixed = _dot(value, tl.trans(dout))
        tl.store(dD + (b * C + c) * H + h, _trace(dmixed, i))
        dinside = dmixed * inside
        dscores += dinside * step[:, None]
        scores = _dot(b_tile, tl.trans(c_tile))
        pair = dinside * scores
        mixed = scores * inside * step[:, None]
        mixed += tl.where(i[:, None] == i[None, :], tl.load(D + h).to(tl.float32), 0.0)
        pairs = (pair * step[:, None]).to(value.dtype)
        own = tl.sum(pair, 1)
        out = (leaving * step)[:, None] * _dot(b_tile, tl.trans(dstate))
        out = _dot(mixed.to(value.dtype), dout, out)
        _store(dx + token * H * P + h * P, i, count, H * P, P, BLOCK_P, out)
        carried = tl.load(gate + 2 * L - 1) * _trace(_dot(state, tl.trans(dstate)), p)
        sent = leaving[:, None] * _dot(value, dstate)
        db += step[:, None] * sent
        left = tl.sum(sent * b_tile, 1)
        read = since[:, None] * _dot(dout, state)
        dc += read
        entered = tl.sum(read * c_tile, 1)
        dlog = _dot(pairs, from_t) + (step * left)[:, None]
        dlog = tl.sum(tl.where(i[:, None] < i[None, :], dlog, entered[:, None]), 0) + carried
        tl.store(dA + (b * C + c) * H + h, tl.sum(dlog * step))
        dstep = dlog * tl.load(A + h).to(tl.float32) + (own + left)
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
    registers: int | None = None


def _runs(dtype: torch.dtype) -> dict[str, Run]:
    """The forward wants 4 programs on an SM (H200: 132), or the 448 heads of B4 H112 take two rounds."""
    if dtype == torch.float32:
        return {"forward": Run(4, 1), "states": Run(4, 1), "backward": Run(4, 1)}
    return {"forward": Run(4, 2), "states": Run(4, 3), "backward": Run(4, 2)}


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
        gates = x.new_empty((B, H, self.C, 3, L), dtype=torch.float32)
        spans = doc_ids.new_empty((B, self.C, 2, L))
        _prepare_kernel[self.C, B, triton.cdiv(H, 16)](
            dt.contiguous(), self.A, doc_ids.contiguous(), decays, gates, spans, T, H, self.C, self.chunk,
            L=L, HEADS=16, num_warps=4,
        )  # fmt: skip
        self.decays = decays, gates, spans

    def options(self, kernel: str) -> dict[str, int]:
        run = self.runs[kernel]
        return self.dims | {"num_warps": run.warps, "num_stages": run.stages, "maxnreg": run.registers}


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
    dy, dfinal = dy.contiguous(), dfinal.contiguous()
    x_stride, key_stride, query_stride = call.strides
    dinitial = torch.empty_like(call.initial)
    states, dstates = (x.new_empty((B, H, call.C, P, N)) for _ in range(2))
    for rows, columns, begin, out, strides, reverse in (
        (call.x, call.key, call.initial, states, (x_stride, key_stride), False),
        (dy, call.query, dfinal, dstates, (H * P, query_stride), True),
    ):
        _states_kernel[(B * H,)](
            rows, columns, call.decays[1], begin, out, dinitial, *strides, *call.sizes, REVERSE=reverse,
            **call.options("states"),
        )  # fmt: skip

    part, parts = _parts(H // G, B * G * call.C)
    summed = x.dtype if parts == 1 else torch.float32
    dkeys, dqueries = (x.new_empty((parts, B, T, G, N), dtype=summed) for _ in range(2))
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dA, dD = x.new_empty((2, B * call.C, H), dtype=torch.float32)
    _backward_kernel[call.C, G * parts, B](
        call.x, call.key, call.query, dy, call.A, call.D, *call.decays, states, dstates,
        dx, ddt, dkeys, dqueries, dA, dD, *call.strides, B, *call.sizes,
        PART=part, **call.options("backward"),
    )  # fmt: skip
    dB, dC = (t[0] if parts == 1 else t.sum(0).to(x.dtype) for t in (dkeys, dqueries))
    return dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD.sum(0).to(D.dtype), dinitial


def _parts(R: int, programs: int) -> tuple[int, int]:
    """Heads a program takes of a group, and programs a group: few groups and chunks would leave SMs idle."""
    parts = max(1, min(R, 512 // programs))
    part = triton.cdiv(R, parts)
    return part, triton.cdiv(R, part)
