"""Triton kernels of ssd_chunk_scan that run forward in time, and the tile functions shared with the backward.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R = H/G heads per group, L tokens per tile, C chunks of
CHUNK <= L tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._triton.constants import LOG2E

# 2^-160 is zero in fp32: clamp larger decays, so that they do not cost neighbouring tokens their precision.
FORGOTTEN = tl.constexpr(-160.0)


@triton.jit
def dot(a, b, total=None):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _seen(rows, count, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the tile elements that exist in a matrix of `count` rows and WIDTH columns."""
    inside = rows[:, None] < count
    if WIDTH % BLOCK:
        inside = inside & (column < WIDTH)
    return inside


@triton.jit
def load_tile(base_ptr, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first=0):
    """Load a (rows,BLOCK) tile of such a matrix, from column `first` on; zeros outside."""
    column = first + tl.arange(0, BLOCK)[None, :]
    seen = _seen(rows, count, column, WIDTH, BLOCK)
    return tl.load(base_ptr + rows[:, None] * stride + column, mask=seen, other=0.0)


@triton.jit
def store_tile(base_ptr, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, tile, first=0):
    column = first + tl.arange(0, BLOCK)[None, :]
    tl.store(base_ptr + rows[:, None] * stride + column, tile, mask=_seen(rows, count, column, WIDTH, BLOCK))


@triton.jit
def load_state(
    base_ptr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, first=0
):
    p, n = tl.arange(0, BLOCK_P)[:, None], first + tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_P == P and N % BLOCK_N == 0:
        return tl.load(base_ptr + p * N + n)
    return tl.load(base_ptr + p * N + n, mask=(p < P) & (n < N), other=0.0)


@triton.jit
def store_state(
    base_ptr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, state
):
    p, n = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_P == P and BLOCK_N == N:
        tl.store(base_ptr + p * N + n, state)
    else:
        tl.store(base_ptr + p * N + n, state, mask=(p < P) & (n < N))


@triton.jit
def decay_between(later, earlier, connected):
    """Decay from after one token to another; 0 where they are not connected (the exponential is undefined there)."""
    return tl.where(connected, tl.exp2(later - earlier).to(tl.float32), 0.0)


@triton.jit
def trace(square, i):
    return tl.sum(tl.where(i[:, None] == i[None, :], square, 0.0))


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _join(sum_a, first_a, sum_b, first_b):
    """Scan operator: sums that restart at each document start, and the last start so far."""
    return tl.where(first_b >= 0, sum_b, sum_a + sum_b), tl.maximum(first_a, first_b)


@triton.jit
def prepare_kernel(
    dt_ptr, A_ptr, doc_ids_ptr, decays_ptr, gates_ptr, spans_ptr, T, H, C, CHUNK, L: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """dt (B,T,H), A (H,), doc_ids (B,T) -> decays (B,H,C,L), gates (B,H,C,3,L), spans (B,C,2,L).

    A span is [first, until): first is -1 if the document began before the chunk. Padding has dt 0: it belongs to the
    last token's document and changes nothing.
    """
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i, h = tl.arange(0, L), block * HEADS + tl.arange(0, HEADS)
    t, own, shape = c * CHUNK + i, (h < H)[None, :], tl.zeros((L, HEADS), tl.int32)
    real, followed = (i < CHUNK) & (t < T), (i + 1 < CHUNK) & (t + 1 < T)
    doc = tl.load(doc_ids_ptr + b * T + t, mask=real, other=0)
    before = tl.load(doc_ids_ptr + b * T + t - 1, mask=real & (t > 0), other=0)
    after = tl.load(doc_ids_ptr + b * T + t + 1, mask=followed, other=0)
    first = tl.where(real & (t > 0) & (doc != before), i, -1)[:, None] + shape
    until = tl.associative_scan(tl.where(followed & (doc != after), i + 1, L), 0, _least, reverse=True)

    step = tl.load(dt_ptr + (b * T + t)[:, None] * H + h[None, :], mask=real[:, None] & own, other=0.0)
    step = step.to(tl.float32)
    rate = tl.load(A_ptr + h, mask=h < H, other=0.0).to(decays_ptr.dtype.element_ty) * LOG2E
    decay, first = tl.associative_scan((tl.maximum(rate[None, :] * step, FORGOTTEN), first), 0, _join)
    whole = tl.sum(tl.where(i[:, None] == L - 1, decay, 0.0), 0)[None, :]
    chunk = ((b * H + h) * C + c)[None, :] * L + i[:, None]
    tl.store(decays_ptr + chunk, decay, mask=own)
    gate = gates_ptr + ((b * H + h) * C + c)[None, :] * 3 * L + i[:, None]
    tl.store(gate, step, mask=own)
    tl.store(gate + L, decay_between(decay, 0.0, first < 0), mask=own)
    tl.store(gate + 2 * L, decay_between(whole, decay, i[:, None] >= tl.max(first, 0)[None, :]), mask=own)
    span = spans_ptr + (b * C + c) * 2 * L + i[:, None] + shape
    tl.store(span, first, mask=(h == 0)[None, :])
    tl.store(span + L, until[:, None] + shape, mask=(h == 0)[None, :])


@triton.jit
def forward_kernel(
    x_ptr, key_ptr, query_ptr, D_ptr, decays_ptr, gates_ptr, spans_ptr, initial_ptr, y_ptr, final_ptr, T, C, CHUNK,
    x_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    b, h, i = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, L)
    head = b * H + h
    x_ptr += b * T * x_stride + h * P
    key_ptr += b * T * key_stride + h // R * N
    query_ptr += b * T * query_stride + h // R * N
    y_ptr += b * T * H * P + h * P
    decays_ptr += head * C * L
    gates_ptr += head * C * 3 * L
    spans_ptr += b * C * 2 * L
    skip = tl.load(D_ptr + h).to(tl.float32)
    state = load_state(initial_ptr + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for c in range(C):
        count = tl.minimum(CHUNK, T - c * CHUNK)
        c_tile = load_tile(query_ptr, i, count, query_stride, N, BLOCK_N)
        b_tile = load_tile(key_ptr, i, count, key_stride, N, BLOCK_N)
        # Transposed scores go to the next product through shared memory, which frees their registers at once.
        decay, until, step = tl.load(decays_ptr + i), tl.load(spans_ptr + L + i), tl.load(gates_ptr + i)
        connected = (i[:, None] <= i[None, :]) & (i[None, :] < until[:, None])
        inside = decay_between(decay[None, :], decay[:, None], connected)
        mixed = dot(b_tile, tl.trans(c_tile)) * inside * step[:, None]
        mixed += tl.where(i[:, None] == i[None, :], skip, 0.0)
        mixed = tl.trans(mixed.to(c_tile.dtype))
        out = tl.load(gates_ptr + L + i)[:, None] * dot(c_tile, tl.trans(state.to(c_tile.dtype)))
        value = load_tile(x_ptr, i, count, x_stride, P, BLOCK_P)
        out = dot(mixed, value, out)
        store_tile(y_ptr, i, count, H * P, P, BLOCK_P, out)
        weight = tl.load(gates_ptr + i) * tl.load(gates_ptr + 2 * L + i)
        weighted = (value * weight[:, None]).to(value.dtype)
        state = dot(tl.trans(weighted), b_tile, tl.load(gates_ptr + 2 * L - 1) * state)
        x_ptr += CHUNK * x_stride
        key_ptr += CHUNK * key_stride
        query_ptr += CHUNK * query_stride
        y_ptr += CHUNK * H * P
        decays_ptr += L
        gates_ptr += 3 * L
        spans_ptr += 2 * L
    store_state(final_ptr + head * P * N, P, N, BLOCK_P, BLOCK_N, state)


@triton.jit
def states_kernel(
    rows_ptr, columns_ptr, gates_ptr, begin_ptr, states_ptr, end_ptr, T, C, CHUNK,
    row_stride: tl.constexpr, column_stride: tl.constexpr, REVERSE: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """states (B,H,C,P,N): the value entering each chunk of a decaying sum of rows_t columns_t^T that starts at `begin`.

    Forward in time, rows and columns are x and B. In reverse they are dy and C, the value entering a chunk is the
    gradient of the state that leaves it, and `end` receives the gradient of the initial state.
    """
    b, h, i = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, L)
    head = b * H + h
    rows_ptr += b * T * row_stride + h * P
    columns_ptr += b * T * column_stride + h // R * N
    state = load_state(begin_ptr + head * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    for j in range(C):
        c = C - 1 - j if REVERSE else j
        token, count = (c * CHUNK).to(tl.int64), tl.minimum(CHUNK, T - c * CHUNK)
        gate = gates_ptr + (head * C + c) * 3 * L
        total = tl.load(gate + 2 * L - 1)
        weight = tl.load(gate + L + i) if REVERSE else tl.load(gate + i) * tl.load(gate + 2 * L + i)
        row = load_tile(rows_ptr + token * row_stride, i, count, row_stride, P, BLOCK_P)
        column = load_tile(columns_ptr + token * column_stride, i, count, column_stride, N, BLOCK_N)
        store_state(states_ptr + (head * C + c) * P * N, P, N, BLOCK_P, BLOCK_N, state)
        weighted = (row * weight[:, None]).to(row.dtype)
        state = dot(tl.trans(weighted), column, total * state)
    if REVERSE:
        store_state(end_ptr + head * P * N, P, N, BLOCK_P, BLOCK_N, state)
