"""Triton kernels of the mamba3_siso forward, and the tile functions shared with the backward.

A chunk has L places and holds CHUNK <= L tokens; the other places are padding, which neither decays nor adds.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._triton.constants import LOG2E

TAU = tl.constexpr(6.283185307179586)
TWO_TO_32 = tl.constexpr(4294967296.0)
ROWS = tl.constexpr(6)  # of the coefficients (B,H,C,6,L), see `prepare_kernel`
HIGH, LOW, GAMMA, SCALE, SINCE, UNTIL = (tl.constexpr(i) for i in range(6))
BEFORE = tl.constexpr(64)  # blocks whose ticks are summed at a time


@triton.jit
def begins(doc_ids_ptr, b, t, T):
    """Whether the document changes at token t. Token 0 continues the given state."""
    inner = (t > 0) & (t < T)
    at = doc_ids_ptr + b.to(tl.int64) * T + t
    return tl.load(at, mask=inner, other=0) != tl.load(at - 1, mask=inner, other=0)


@triton.jit
def offset(strides, b, t, h):
    """Offset of (b, t, h) in a (B,T,H,...) tensor."""
    return tl.cast(b, tl.int64) * strides[0] + tl.cast(t, tl.int64) * strides[1] + h * strides[2]


@triton.jit
def seen(rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the tile elements that exist in a matrix of `count` rows and WIDTH columns."""
    inside = (rows[:, None] >= 0) & (rows[:, None] < count)
    if BLOCK > WIDTH:
        inside = inside & (tl.arange(0, BLOCK)[None, :] < WIDTH)
    return inside


@triton.jit
def load_tile(base_ptr, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a (rows,BLOCK) tile of such a matrix; zeros outside."""
    at = base_ptr + rows[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    return tl.load(at, mask=seen(rows, count, WIDTH, BLOCK), other=0.0)


@triton.jit
def store_tile(base_ptr, rows, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, tile):
    at = base_ptr + rows[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    tl.store(at, tile, mask=seen(rows, count, WIDTH, BLOCK))


@triton.jit
def load_row(base_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (BLOCK,) in fp32, zeros from WIDTH on."""
    i = tl.arange(0, BLOCK)
    return tl.load(base_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def load_state(base_ptr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    return load_tile(base_ptr, tl.arange(0, BLOCK_P), P, N, N, BLOCK_N)


@triton.jit
def store_state(
    base_ptr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, state
):
    store_tile(base_ptr, tl.arange(0, BLOCK_P), P, N, N, BLOCK_N, state)


@triton.jit
def dot(a, b, total=None):
    """Matrix product: IEEE fp32 for fp32 operands; 16-bit operands use the tensor cores."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def pairs_of(x):
    """Split (L,M) into its even and odd columns (L,M/2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def from_pairs(even, odd):
    return tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1] * 2))


@triton.jit
def cos_sin(ticks):
    """Cosine and sine of an angle in units of 2^-32 turns, int32; each off by less than 2.5e-7.

    Minimax polynomials of half the angle, doubled: no table, and no slow path for large arguments.
    """
    turns = ticks.to(tl.float32) / TWO_TO_32
    s = turns * turns
    c = 2.550042152404785 + s * (-0.5980979800224304 + s * 0.07730873674154282)
    half_sin = turns * (3.141592502593994 + s * (-5.167707920074463 + s * c))
    c = -1.3352121114730835 + s * (0.23493756353855133 - s * 0.024396715685725212)
    half_cos = 1.0 + s * (-4.934802055358887 + s * (4.058709144592285 + s * c))
    # Both formulas of the cosine double an error; use the one whose error is small.
    cos = tl.where(s > 0.0625, 2 * half_cos * half_cos - 1, 1 - 2 * half_sin * half_sin)
    return cos, 2 * half_sin * half_cos


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """sigmoid(x). A division takes 8 instructions, a squared rsqrt 2, with an error of 2.5e-7."""
    if EXACT:
        return 1 / (1 + tl.exp(-x))
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def tanh(x):
    """tanh(x). For small x, where the quotient cancels, a minimax polynomial (relative error 1e-7)."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    large = (1 - e) / (1 + e)
    s = x * x
    c = -0.05378813296556473 + s * (0.020809803158044815 - s * 0.005910614039748907)
    small = x + x * s * (-0.33333301544189453 + s * (0.13331978023052216 + s * c))
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit
def to_ticks(turns):
    """Convert turns to ticks: units of 2^-32 turns, modulo a whole turn, int32."""
    return tl.floor(turns * TWO_TO_32 + 0.5).to(tl.int64).to(tl.int32)


@triton.jit
def restart(begun, total, begins_here, value):
    """Scan operator on (flag, sum): a running sum that restarts where the flag is set."""
    return begun | begins_here, tl.where(begins_here != 0, value, total + value)


@triton.jit
def running_sum(x, starts):
    """Sum x (M,N) over the rows, restarting at each row that `starts` (M,)."""
    if tl.max(starts.to(tl.int32)) != 0:
        flags = (starts[:, None] & (tl.arange(0, x.shape[1]) >= 0)[None, :]).to(tl.int32)
        _, total = tl.associative_scan((flags, x), 0, restart)
    else:
        total = tl.cumsum(x, 0)
    return total


@triton.jit
def decay_between(coefficients_ptr, high, L: tl.constexpr, EXACT: tl.constexpr, LATER: tl.constexpr):
    """Decay from after one place to a later one (L,L), the later ones along axis LATER; other entries are undefined.

    high (L,): row HIGH of the coefficients. The low part is below the precision of 16-bit operands, so it is used only
    if EXACT.
    """
    i = tl.arange(0, L)
    exponent = tl.expand_dims(tl.load(coefficients_ptr + HIGH * L + i), 1 - LATER) - tl.expand_dims(
        high, LATER
    )
    if EXACT:
        low = tl.load(coefficients_ptr + LOW * L + i)
        exponent += tl.expand_dims(low, 1 - LATER) - tl.expand_dims(low, LATER)
    return tl.exp2(exponent)


@triton.jit
def first_beta(dt_ptr, trap_ptr, b, T, H, head):
    """(1 - lam) dt of token 0: the weight of the given v_prev k_prev^T."""
    at = b.to(tl.int64) * T * H + head
    return tl.load(dt_ptr + at).to(tl.float32) / (1 + tl.exp(tl.load(trap_ptr + at).to(tl.float32)))


@triton.jit
def initial_state(
    h_given_ptr, k_given_ptr, v_given_ptr, dt_ptr, trap_ptr, b, T, H, head,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """State that enters the first chunk: h plus the weighted v_prev k_prev^T."""
    row = b.to(tl.int64) * H + head
    key, value = load_row(k_given_ptr + row * N, N, BLOCK_N), load_row(v_given_ptr + row * P, P, BLOCK_P)
    given = load_state(h_given_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    return given + first_beta(dt_ptr, trap_ptr, b, T, H, head) * value[:, None] * key[None, :]


@triton.jit
def prepare_kernel(
    adt_ptr, dt_ptr, trap_ptr, doc_ids_ptr, coefficients_ptr, spans_ptr, T, C,
    H: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads, chunk, row): the per-token scalars, transposed.

    coefficients (B,H,C,6,L): the log2 decay summed from the start of the chunk or of the document, as the sum
    of two fp32; gamma = lam dt; scale = gamma + beta of the next token; decay of the state that enters the
    chunk up to and including a place, 0 once a document has begun; decay from after a place to the end of the
    chunk, 0 if a document begins in between. spans (B,C,2,L): the places of the chunk at which the document of a
    place begins (-1: before the chunk) and ends. A decay is a difference of running sums. These are summed in fp64,
    restarted with each document and stored in two parts, so a decay is as exact as a sum of its own terms and
    independent of other documents. WIDE is the dtype of the weights, fp64 for fp32 operands.
    """
    c, b = tl.program_id(1), tl.program_id(2)
    i, h = tl.arange(0, L), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    t = c * CHUNK + i
    live = (i < CHUNK) & (t < T)
    start = live & begins(doc_ids_ptr, b, t, T)
    valid = live[:, None] & (h < H)[None, :]
    followed = valid & ((t < T - 1) & (begins(doc_ids_ptr, b, t + 1, T) == 0))[:, None]
    at = (b.to(tl.int64) * T + t[:, None]) * H + h[None, :]
    # A decay of 2^-256 is zero in fp32: clamping there changes nothing, and keeps -inf out of the sums.
    decay = tl.load(adt_ptr + at, mask=valid, other=0.0).to(tl.float64) * LOG2E
    decay = tl.where(decay > -256.0, decay, -256.0)
    lam = 1 / (1 + tl.exp(-tl.load(trap_ptr + at, mask=valid, other=0.0).to(WIDE)))
    gamma = tl.load(dt_ptr + at, mask=valid, other=0.0).to(WIDE) * lam
    lam_opposite = 1 / (1 + tl.exp(tl.load(trap_ptr + at + H, mask=followed, other=0.0).to(WIDE)))
    scale = gamma + tl.load(dt_ptr + at + H, mask=followed, other=0.0).to(WIDE) * lam_opposite

    _, total = tl.associative_scan(((start[:, None] & valid).to(tl.int32), decay), 0, restart)
    high = total.to(tl.float32)
    whole = tl.sum(tl.where((i == L - 1)[:, None], total, 0.0), 0)
    untouched, last_start = i < tl.min(tl.where(start, i, L)), tl.max(tl.where(start, i, -1))
    since = tl.where(untouched[:, None], tl.exp2(high), 0.0)
    until = tl.where((i >= last_start)[:, None], tl.exp2((whole[None, :] - total).to(tl.float32)), 0.0)
    at = coefficients_ptr + ((b.to(tl.int64) * H + h[None, :]) * C + c) * (ROWS * L) + i[:, None]
    exists = (i >= 0)[:, None] & (h < H)[None, :]
    tl.store(at + HIGH * L, high, mask=exists)
    tl.store(at + LOW * L, (total - high.to(tl.float64)).to(tl.float32), mask=exists)
    tl.store(at + GAMMA * L, gamma.to(tl.float32), mask=exists)
    tl.store(at + SCALE * L, scale.to(tl.float32), mask=exists)
    tl.store(at + SINCE * L, since, mask=exists)
    tl.store(at + UNTIL * L, until, mask=exists)
    if tl.program_id(0) == 0:
        opens = start[None, :] & (i[None, :] <= i[:, None])
        follows = start[None, :] & (i[None, :] > i[:, None])
        to = spans_ptr + (b * C + c) * 2 * L + i
        tl.store(to, tl.max(tl.where(opens, i[None, :], -1), 1))
        tl.store(to + L, tl.min(tl.where(follows, i[None, :], L), 1) - 1)


@triton.jit
def token_ticks(
    angles_ptr, strides, dt_ptr, b, t0, T, head, H, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Rotation of each token of a block in ticks (BLOCK_T,BLOCK_R): tanh(angle) dt / 2 turns."""
    i = tl.arange(0, BLOCK_T)
    rate = tl.load(dt_ptr + (b.to(tl.int64) * T + t0 + i) * H + head, mask=t0 + i < T, other=0.0).to(
        tl.float32
    )
    x = load_tile(angles_ptr + offset(strides, b, t0, head), i, T - t0, strides[1], R, BLOCK_R)
    return to_ticks(tanh(x.to(tl.float32)) * (0.5 * rate)[:, None])


@triton.jit
def turn_sum_kernel(
    angles_ptr, angle_strides, dt_ptr, doc_ids_ptr, theta_ptr, block_turns_ptr, block_starts_ptr, T, blocks,
    H: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per (head, BLOCKS blocks of BLOCK_T tokens, row): the rotation that a block adds to later tokens.

    block_turns (B,H,1+blocks,R): the given theta, then for each block the ticks since the last document start
    in it; block_starts (B,1+blocks): whether there is one. Angles are summed as 32-bit fixed point, where a
    whole turn wraps around: exact, in any order.
    """
    head, block, b = tl.program_id(0), tl.program_id(1) * BLOCKS, tl.program_id(2)
    i, j, r, t0 = tl.arange(0, BLOCK_T), tl.arange(0, BLOCKS), tl.arange(0, BLOCK_R), block * BLOCK_T
    row, entries = b.to(tl.int64) * H + head, blocks + 1
    starts = begins(doc_ids_ptr, b, t0 + j[:, None] * BLOCK_T + i[None, :], T)
    ticks = token_ticks(angles_ptr, angle_strides, dt_ptr, b, t0, T, head, H, R, BLOCK_R, BLOCK_T * BLOCKS)
    last_start = tl.max(tl.where(starts, i[None, :], -1), 1)
    since = (i[None, :] >= last_start[:, None])[:, :, None]
    total = tl.sum(tl.where(since, tl.reshape(ticks, (BLOCKS, BLOCK_T, BLOCK_R)), 0), 1)
    store_tile(block_turns_ptr + (row * entries + 1 + block) * R, j, blocks - block, R, R, BLOCK_R, total)
    if head == 0:
        at = block_starts_ptr + b * entries + 1 + block + j
        tl.store(at, (last_start >= 0).to(tl.int32), mask=j < blocks - block)
    if block == 0:
        given = tl.load(theta_ptr + row * R + r, mask=r < R, other=0.0).to(tl.float64) / TAU
        tl.store(block_turns_ptr + row * entries * R + r, to_ticks(given - tl.floor(given)), mask=r < R)
        tl.store(block_starts_ptr + b * entries, 0)


@triton.jit
def turn_start_kernel(
    block_turns_ptr, block_starts_ptr, blocks, H: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr
):
    """One program per (head, row): block_turns becomes the angle at the start of each block, in ticks."""
    head, b, j = tl.program_id(0), tl.program_id(1), tl.arange(0, BEFORE)
    block_turns_ptr += (b.to(tl.int64) * H + head) * (blocks + 1) * R
    block_starts_ptr += b * (blocks + 1)
    entering = tl.zeros((BLOCK_R,), tl.int32)
    for begin in range(0, blocks, BEFORE):
        count = blocks - begin
        starts = tl.load(block_starts_ptr + begin + j, mask=j < count, other=0) != 0
        ticks = load_tile(block_turns_ptr + begin * R, j, count, R, R, BLOCK_R)
        ticks += tl.where(((j == 0) & (starts == 0))[:, None], entering[None, :], 0)
        total = running_sum(ticks, starts)
        store_tile(block_turns_ptr + begin * R, j, count, R, R, BLOCK_R, total)
        entering = tl.sum(tl.where((j == BEFORE - 1)[:, None], total, 0), 0)


@triton.jit
def turned(tile, biases, cos, sin):
    """The rotated columns of q or k after bias and rotation, fp32 (BLOCK_T,2 BLOCK_R)."""
    even, odd = pairs_of(tile.to(tl.float32) + biases[None, :])
    return from_pairs(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def turn_kernel(
    q_ptr, q_strides, k_ptr, k_strides, q_bias_ptr, k_bias_ptr, angles_ptr, angle_strides, dt_ptr, doc_ids_ptr,
    block_turns_ptr,
    queries_ptr, keys_ptr, turns_ptr, theta_final_ptr, k_final_ptr, T,
    H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One program per (head, block of BLOCK_T tokens, row): queries and keys (B,H,T,N) after bias and rotation.

    With KEEP also turns (B,H,T,R) int32, the running angle of each token in ticks. The program of the last block
    writes theta_final and, from unrounded values, k_final.
    """
    head, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, blocks, group = b.to(tl.int64) * H + head, tl.num_programs(1), head // HEADS_A_GROUP
    REST: tl.constexpr = N - 2 * R
    t0, i, r = block * BLOCK_T, tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    # Issue all loads before the first store: after it they would wait for it.
    at_q, at_k = q_ptr + offset(q_strides, b, t0, group), k_ptr + offset(k_strides, b, t0, group)
    q_bias_ptr += head * N
    k_bias_ptr += head * N
    entering = tl.load(block_turns_ptr + (row * (blocks + 1) + block) * R + r, mask=r < R, other=0)
    query = load_tile(at_q, i, T - t0, q_strides[1], 2 * R, 2 * BLOCK_R)
    key = load_tile(at_k, i, T - t0, k_strides[1], 2 * R, 2 * BLOCK_R)
    rest_of_query = load_tile(at_q + 2 * R, i, T - t0, q_strides[1], REST, BLOCK_REST)
    rest_of_key = load_tile(at_k + 2 * R, i, T - t0, k_strides[1], REST, BLOCK_REST)
    q_bias, k_bias = load_row(q_bias_ptr, 2 * R, 2 * BLOCK_R), load_row(k_bias_ptr, 2 * R, 2 * BLOCK_R)
    rest_of_q_bias = load_row(q_bias_ptr + 2 * R, REST, BLOCK_REST)
    rest_of_k_bias = load_row(k_bias_ptr + 2 * R, REST, BLOCK_REST)
    starts = begins(doc_ids_ptr, b, t0 + i, T)
    ticks = token_ticks(angles_ptr, angle_strides, dt_ptr, b, t0, T, head, H, R, BLOCK_R, BLOCK_T)

    ticks += tl.where(((i == 0) & (starts == 0))[:, None], entering[None, :], 0)
    total = running_sum(ticks, starts)
    cos, sin = cos_sin(total)
    first = row * T + t0
    query = turned(query, q_bias, cos, sin)
    store_tile(queries_ptr + first * N, i, T - t0, N, 2 * R, 2 * BLOCK_R, query)
    key = turned(key, k_bias, cos, sin)
    store_tile(keys_ptr + first * N, i, T - t0, N, 2 * R, 2 * BLOCK_R, key)
    rest_of_query = rest_of_query.to(tl.float32) + rest_of_q_bias[None, :]
    store_tile(queries_ptr + first * N + 2 * R, i, T - t0, N, REST, BLOCK_REST, rest_of_query)
    rest_of_key = rest_of_key.to(tl.float32) + rest_of_k_bias[None, :]
    store_tile(keys_ptr + first * N + 2 * R, i, T - t0, N, REST, BLOCK_REST, rest_of_key)
    if KEEP:
        store_tile(turns_ptr + first * R, i, T - t0, R, R, BLOCK_R, total)
    if block == blocks - 1:
        last = tl.where(t0 + i == T - 1, 0, -1)  # row of k_final for a token, -1 for none
        store_tile(k_final_ptr + row * N, last, 1, N, 2 * R, 2 * BLOCK_R, key)
        store_tile(k_final_ptr + row * N + 2 * R, last, 1, N, REST, BLOCK_REST, rest_of_key)
        exact = tl.sum(tl.where((t0 + i == T - 1)[:, None], total, 0), 0).to(tl.float64) / TWO_TO_32
        radians = ((exact - tl.floor(exact)) * TAU).to(tl.float32)
        # 2 pi is not exact in fp32: an angle that rounds up to the value above it is a whole turn, that is 0.
        radians = tl.where(radians < 6.2831852, radians, 0.0)
        tl.store(theta_final_ptr + row * R + r, radians, mask=r < R)


@triton.jit
def scan_kernel(
    queries_ptr, keys_ptr, v_ptr, v_strides, z_ptr, z_strides, D_ptr, coefficients_ptr, spans_ptr, dt_ptr,
    trap_ptr, h_given_ptr, k_given_ptr, v_given_ptr,
    y_ptr, h_final_ptr, v_final_ptr, T, C, H: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, row) loops over the chunks with the state in fp32 registers.

    A chunk takes four products: scores, the outputs from the state and from the chunk, and the new state. The weight
    of a token is gamma for itself and scale for later ones; no weight is subtracted again.
    """
    head, b, i = tl.program_id(0), tl.program_id(1), tl.arange(0, L)
    row = b.to(tl.int64) * H + head
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    skip = tl.load(D_ptr + head).to(tl.float32)
    state = initial_state(
        h_given_ptr, k_given_ptr, v_given_ptr, dt_ptr, trap_ptr, b, T, H, head, P, N, BLOCK_P, BLOCK_N
    )
    v_ptr += offset(v_strides, b, 0, head)
    z_ptr += offset(z_strides, b, 0, head)
    y_ptr += b.to(tl.int64) * T * H * P + head * P
    queries_ptr += row * T * N
    keys_ptr += row * T * N
    coefficients_ptr += row * C * (ROWS * L)
    spans_ptr += b * C * 2 * L
    for c in range(C):
        count = tl.minimum(CHUNK, T - c * CHUNK)
        query = load_tile(queries_ptr, i, count, N, N, BLOCK_N)
        key = load_tile(keys_ptr, i, count, N, N, BLOCK_N)
        first, scale = tl.load(spans_ptr + i), tl.load(coefficients_ptr + SCALE * L + i)
        earlier = (i[None, :] < i[:, None]) & (i[None, :] >= first[:, None])
        high = tl.load(coefficients_ptr + HIGH * L + i)
        weight = tl.where(earlier, decay_between(coefficients_ptr, high, L, EXACT, 0) * scale[None, :], 0.0)
        gamma = tl.load(coefficients_ptr + GAMMA * L + i)[:, None]
        scores = dot(query, tl.trans(key))
        diagonal = i[:, None] == i[None, :]
        scores = tl.where(diagonal, scores * gamma + skip, scores * weight).to(dtype)
        out = dot(query, tl.trans(state.to(dtype)))
        out *= tl.load(coefficients_ptr + SINCE * L + i)[:, None]
        value = load_tile(v_ptr, i, count, v_strides[1], P, BLOCK_P)
        out = dot(scores, value, out)
        gate = load_tile(z_ptr, i, count, z_strides[1], P, BLOCK_P).to(tl.float32)
        store_tile(y_ptr, i, count, H * P, P, BLOCK_P, out * gate * sigmoid(gate, EXACT))
        weighted = (value * (scale * tl.load(coefficients_ptr + UNTIL * L + i))[:, None]).to(dtype)
        state = dot(tl.trans(weighted), key, state * tl.load(coefficients_ptr + SINCE * L + L - 1))
        v_ptr += CHUNK * v_strides[1]
        z_ptr += CHUNK * z_strides[1]
        y_ptr += CHUNK * H * P
        queries_ptr += CHUNK * N
        keys_ptr += CHUNK * N
        coefficients_ptr += ROWS * L
        spans_ptr += 2 * L
    store_state(h_final_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N, state)
    last = load_row(v_ptr + (T - 1 - C * CHUNK) * v_strides[1], P, BLOCK_P)
    tl.store(v_final_ptr + row * P + tl.arange(0, BLOCK_P), last, mask=tl.arange(0, BLOCK_P) < P)
