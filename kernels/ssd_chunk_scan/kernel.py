"""ssd_chunk_scan in Triton: the forward walks a head's chunks one after the other, the backward takes them all at once.

    prepare     one program per (chunk, heads of a row): decays, the log decay (base 2) summed along the chunk, anew
                from each document start; gates, by token dt, the decay since the chunk's start and that until its
                end; spans, by token where in the chunk its document begins and ends. No later kernel scans.
    forward     one program per (row, head). The state (P,N) stays in registers from the first chunk to the last, so
                that none is written. A chunk is four matrix products: scores, what the state gives, what the chunk
                itself gives (D is on the diagonal of that one), and the new state.
    states      one program per (row, head), run twice: forward in time for the state that enters each chunk, and
                backward in time for the gradient of the state that leaves it. Both are stored in x.dtype.
    backward    one program per (chunk, group). It takes the group's heads one after the other, so that dB and dC are
                register sums: no atomics, the same bits every time. Scores are computed again. What is (s,t)-shaped
                has s as its row: then no product of a head needs one transposed.

Documents are apart to the last bit. A decay between two tokens is one difference of sums within their document. The
gradient of a log decay is the sum over the pairs s < t <= i that it lies between: a product with a triangle of ones
forms it, for a difference of row sums and column sums would cancel only nearly. And d dt = ... + x . d(dt x) is
taken from the same pairs, so that neither x nor dy is needed element by element.

Rounding: sums, decays and states are fp32, operands of products are x.dtype, also decayed scores, dt x and states.
fp32 inputs take the FMA units, and fp64 for decays. In fp16 a state above 65504 overflows.

Bytes for B4 T4096 H112 P64 N64 G8 in bf16: forward x and y, 470 MB, 0.11 ms at 4.2 TB/s (B and C, 34 MB each, come
to 14 heads out of L2). Backward 2.2 GB, 0.53 ms: x and dy twice, states of both kinds (235 MB each) written and read,
dx. Its floor is 0.8 GB. To keep the states out of memory the backward, too, would have to be one program a head, and
write dB and dC per head, which is as much.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R = H/G heads a group, L tokens a tile, C chunks of
CHUNK <= L tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-160 is zero in fp32: a token that forgets more than this must not cost its neighbours their digits.
FORGOTTEN = tl.constexpr(-160.0)
PREPARED_HEADS = 16
ENOUGH_PROGRAMS = 512


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
def _decay(later, earlier, connected):
    """From after one token to another, 0 where they are not connected; there the exponential may be anything."""
    return tl.where(connected, tl.exp2(later - earlier).to(tl.float32), 0.0)


@triton.jit
def _trace(square, i):
    return tl.sum(tl.where(i[:, None] == i[None, :], square, 0.0))


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _join(sum_a, first_a, sum_b, first_b):
    """Sums that begin anew at each document start, and the last start so far."""
    return tl.where(first_b >= 0, sum_b, sum_a + sum_b), tl.maximum(first_a, first_b)


@triton.jit
def _prepare_kernel(
    dt, A, doc_ids, decays, gates, spans, T, H, C, CHUNK, L: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """dt (B,T,H), A (H,), doc_ids (B,T) -> decays (B,H,C,L), gates (B,H,C,3,L), spans (B,C,2,L).

    A span is [first, until): first is -1 where the document was there before the chunk. Padding has dt 0, so that it
    belongs to the last token's document and changes nothing.
    """
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i, h = tl.arange(0, L), block * HEADS + tl.arange(0, HEADS)
    t, own, shape = c * CHUNK + i, (h < H)[None, :], tl.zeros((L, HEADS), tl.int32)
    real, followed = (i < CHUNK) & (t < T), (i + 1 < CHUNK) & (t + 1 < T)
    doc = tl.load(doc_ids + b * T + t, mask=real, other=0)
    before = tl.load(doc_ids + b * T + t - 1, mask=real & (t > 0), other=0)
    after = tl.load(doc_ids + b * T + t + 1, mask=followed, other=0)
    first = tl.where(real & (t > 0) & (doc != before), i, -1)[:, None] + shape
    until = tl.associative_scan(tl.where(followed & (doc != after), i + 1, L), 0, _least, reverse=True)

    step = tl.load(dt + (b * T + t)[:, None] * H + h[None, :], mask=real[:, None] & own, other=0.0)
    step = step.to(tl.float32)
    rate = tl.load(A + h, mask=h < H, other=0.0).to(decays.dtype.element_ty) * LOG2E
    decay, first = tl.associative_scan((tl.maximum(rate[None, :] * step, FORGOTTEN), first), 0, _join)
    whole = tl.sum(tl.where(i[:, None] == L - 1, decay, 0.0), 0)[None, :]
    chunk = ((b * H + h) * C + c)[None, :] * L + i[:, None]
    tl.store(decays + chunk, decay, mask=own)
    gate = gates + ((b * H + h) * C + c)[None, :] * 3 * L + i[:, None]
    tl.store(gate, step, mask=own)
    tl.store(gate + L, _decay(decay, 0.0, first < 0), mask=own)
    tl.store(gate + 2 * L, _decay(whole, decay, i[:, None] >= tl.max(first, 0)[None, :]), mask=own)
    span = spans + (b * C + c) * 2 * L + i[:, None] + shape
    tl.store(span, first, mask=(h == 0)[None, :])
    tl.store(span + L, until[:, None] + shape, mask=(h == 0)[None, :])


@triton.jit
def _forward_kernel(
    x, key, query, D, decays, gates, spans, initial, y, final, T, C, CHUNK,
    x_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    b, h, i = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, L)
    head = b * H + h
    x += b * T * x_stride + h * P
    key += b * T * key_stride + h // R * N
    query += b * T * query_stride + h // R * N
    y += b * T * H * P + h * P
    decays += head * C * L
    gates += head * C * 3 * L
    spans += b * C * 2 * L
    skip = tl.load(D + h).to(tl.float32)
    state = _load_state(initial + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for c in range(C):
        # A tile stays in registers from its load on: each is loaded where it is used, the slow ones by stages.
        count = tl.minimum(CHUNK, T - c * CHUNK)
        since, total = tl.load(gates + L + i), tl.load(gates + 2 * L - 1)
        c_tile = _load(query, i, count, query_stride, N, BLOCK_N)
        b_tile = _load(key, i, count, key_stride, N, BLOCK_N)
        decay, first, step = tl.load(decays + i), tl.load(spans + i), tl.load(gates + i)
        connected = (i[None, :] <= i[:, None]) & (i[None, :] >= first[:, None])
        inside = _decay(decay[:, None], decay[None, :], connected)
        mixed = _dot(c_tile, tl.trans(b_tile)) * inside * step[None, :]
        mixed += tl.where(i[:, None] == i[None, :], skip, 0.0)
        out = since[:, None] * _dot(c_tile, tl.trans(state.to(c_tile.dtype)))
        value = _load(x, i, count, x_stride, P, BLOCK_P)
        out = _dot(mixed.to(value.dtype), value, out)
        _store(y, i, count, H * P, P, BLOCK_P, out)
        weight = step * tl.load(gates + 2 * L + i)
        weighted = (value * weight[:, None]).to(value.dtype)
        state = _dot(tl.trans(weighted), b_tile, total * state)
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
    rows, columns, gates, begin, states, end, T, C, CHUNK,
    row_stride: tl.constexpr, column_stride: tl.constexpr, REVERSE: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """states (B,H,C,P,N): what comes into each chunk of a decaying sum of rows_t columns_t^T that starts as `begin`.

    Forward in time rows and columns are x and B. In reverse they are dy and C, what comes into a chunk is the
    gradient of the state that leaves it, and `end` receives that of the initial state.
    """
    b, h, i = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, L)
    head = b * H + h
    rows += b * T * row_stride + h * P
    columns += b * T * column_stride + h // R * N
    state = _load_state(begin + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for j in range(C):
        c = C - 1 - j if REVERSE else j
        token, count = (c * CHUNK).to(tl.int64), tl.minimum(CHUNK, T - c * CHUNK)
        gate = gates + (head * C + c) * 3 * L
        total = tl.load(gate + 2 * L - 1)
        weight = tl.load(gate + L + i) if REVERSE else tl.load(gate + i) * tl.load(gate + 2 * L + i)
        row = _load(rows + token * row_stride, i, count, row_stride, P, BLOCK_P)
        column = _load(columns + token * column_stride, i, count, column_stride, N, BLOCK_N)
        _store_state(states + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N, state)
        weighted = (row * weight[:, None]).to(row.dtype)
        state = _dot(tl.trans(weighted), column, total * state)
    if REVERSE:
        _store_state(end + head * P * N, P, N, BLOCK_P, BLOCK_N, state)


@triton.jit
def _backward_kernel(
    x, key, query, dy, A, D, decays, gates, spans, states, dstates, dx, ddt, dkey, dquery, dA, dD, B, T, C, CHUNK,
    x_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    PART: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """PART heads of one group on one chunk. dkey and dquery (parts,B,T,G,N), dA and dD (B,C,H) are partial sums.

    The order of the statements is that of the fewest live registers.
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
        decay, until = tl.load(decays + (head * C + c) * L + i), tl.load(spans + (b * C + c) * 2 * L + L + i)
        gate = gates + (head * C + c) * 3 * L
        step, since, leaving = tl.load(gate + i), tl.load(gate + L + i), tl.load(gate + 2 * L + i)
        state = _load_state(states + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N)
        dstate = _load_state(dstates + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N)
        value = _load(x + token * x_stride + h * P, i, count, x_stride, P, BLOCK_P)
        dout = _load(dy + token * H * P + h * P, i, count, H * P, P, BLOCK_P)

        connected = (i[None, :] >= i[:, None]) & (i[None, :] < until[:, None])
        inside = _decay(decay[None, :], decay[:, None], connected)
        dmixed = _dot(value, tl.trans(dout))
        tl.store(dD + (b * C + c) * H + h, _trace(dmixed, i))
        dinside = dmixed * inside
        dscores += dinside * step[:, None]
        scores = _dot(b_tile, tl.trans(c_tile))
        pair = dinside * scores
        mixed = scores * inside * step[:, None]
        mixed += tl.where(i[:, None] == i[None, :], tl.load(D + h).to(tl.float32), 0.0)
        weighted_pair = (pair * step[:, None]).to(value.dtype)
        dstep = tl.sum(pair, 1)
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
        # A log decay at t lies between s < t and each i >= t, the chunk's end, and the state that enters.
        dlog = _dot(weighted_pair, from_t) + (step * left)[:, None]
        dlog = tl.sum(tl.where(i[:, None] < i[None, :], dlog, entered[:, None]), 0) + carried
        tl.store(dA + (b * C + c) * H + h, tl.sum(dlog * step))
        dstep = dlog * tl.load(A + h).to(tl.float32) + (dstep + left)
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


def _runs(P: int, N: int, dtype: torch.dtype) -> tuple[int, dict[str, Run]]:
    """Tokens a tile, and how to run each kernel. Four warps are one wgmma high (64 rows)."""
    if dtype == torch.float32:
        return 16, {name: Run(8, 1) for name in ("forward", "states", "backward")}
    if max(P, N) <= 64:
        return 64, {"forward": Run(4, 3), "states": Run(4, 3), "backward": Run(4, 2)}
    return 64, {"forward": Run(8, 2), "states": Run(8, 2), "backward": Run(8, 1)}


def _tokens(t: Tensor) -> tuple[Tensor, int]:
    """(B,T,a,b) and the distance between tokens: as it is if that alone parts it from contiguous, else a copy."""
    B, T, a, b = t.shape
    token = t.stride(1)
    if t.stride()[2:] == (b, 1) and (B == 1 or t.stride(0) == T * token):
        return t, token
    return t.contiguous(), a * b


class _Call:
    """The inputs of one call as the kernels take them."""

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
        _prepare_kernel[C, B, triton.cdiv(H, PREPARED_HEADS)](
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
    (B,H,P,N) fp32. A chunk_size above the tile (64 tokens, 16 in fp32) is taken as the tile.
    Raises ValueError on P or N above 128."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    B, H = x.shape[0], x.shape[2]
    y, final = x.new_empty(x.shape), x.new_empty(initial_state.shape, dtype=torch.float32)
    _forward_kernel[(B * H,)](
        call.x, call.key, call.query, call.D, call.decays, call.gates, call.spans, call.initial, y, final,
        *call.sizes, **call.strides, **call.options("forward"),
    )  # fmt: skip
    return y, final


def ssd_chunk_scan_bwd_kernel(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, doc_ids: Tensor,
    initial_state: Tensor, chunk_size: int, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, A, Bmat, Cmat, D, initial_state from those of y (B,T,H,P) and the final state."""
    call = _Call(x, dt, A, Bmat, Cmat, D, doc_ids, initial_state, chunk_size)
    (B, T, H, P), (G, N), C = x.shape, Bmat.shape[2:], call.sizes[1]
    dy, dfinal = dy.contiguous(), dfinal.contiguous()
    dinitial = torch.empty_like(call.initial)
    states, dstates = (x.new_empty((B, H, C, P, N)) for _ in range(2))
    for rows, row_stride, columns, column_stride, begin, out, reverse in (
        (call.x, call.strides["x_stride"], call.key, call.strides["key_stride"], call.initial, states, False),
        (dy, H * P, call.query, call.strides["query_stride"], dfinal, dstates, True),
    ):
        _states_kernel[(B * H,)](
            rows, columns, call.gates, begin, out, dinitial, *call.sizes, row_stride=row_stride,
            column_stride=column_stride, REVERSE=reverse, **call.options("states"),
        )  # fmt: skip

    part, parts = _parts(H // G, B * G * C)
    summed = x.dtype if parts == 1 else torch.float32
    dkeys, dqueries = (x.new_empty((parts, B, T, G, N), dtype=summed) for _ in range(2))
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dA, dD = (x.new_empty((B * C, H), dtype=torch.float32) for _ in range(2))
    _backward_kernel[C, G * parts, B](
        call.x, call.key, call.query, dy, call.A, call.D, call.decays, call.gates, call.spans, states, dstates,
        dx, ddt, dkeys, dqueries, dA, dD, B, *call.sizes, PART=part, **call.strides, **call.options("backward"),
    )  # fmt: skip
    dB, dC = (t[0] if parts == 1 else t.sum(0).to(x.dtype) for t in (dkeys, dqueries))
    return dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD.sum(0).to(D.dtype), dinitial


def _parts(R: int, programs: int) -> tuple[int, int]:
    """Heads a program takes of a group, and programs a group: with few groups and chunks SMs would lie idle."""
    part = triton.cdiv(R, max(1, min(R, ENOUGH_PROGRAMS // programs)))
    return part, triton.cdiv(R, part)
