"""Triton kernels of the mamba3_siso forward, and the tile functions that the backward shares with them.

A chunk has L places and holds CHUNK <= L tokens; the other places are padding, which neither decays nor adds.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAU = tl.constexpr(6.283185307179586)
LOG2E = tl.constexpr(1.4426950408889634)
TWO_TO_32 = tl.constexpr(4294967296.0)
ROWS = tl.constexpr(4)  # of the coefficients (B,H,C,4,L): see `prepare_kernel`
# fp32 operands keep all their bits; 16-bit operands go to the tensor cores whatever this says.
PRECISION = tl.constexpr("ieee")


@triton.jit
def begins(doc_ids, b, t, T):
    """Whether the document changes at token t. Token 0 continues whatever the given state holds."""
    asked = (t > 0) & (t < T)
    at = doc_ids + b.to(tl.int64) * T + t
    return tl.load(at, mask=asked, other=0) != tl.load(at - 1, mask=asked, other=0)


@triton.jit
def offset(strides, b, t, h):
    """Where (b, t, h) lies in a (B,T,H,...) tensor."""
    return tl.cast(b, tl.int64) * strides[0] + tl.cast(t, tl.int64) * strides[1] + h * strides[2]


@triton.jit
def load_rows(base, stride, live, n, N):
    """Rows base + i stride, columns n < N; zero in the places that hold no token."""
    i = tl.arange(0, live.shape[0])
    mask = live[:, None] & (n < N)[None, :]
    return tl.load(base + i[:, None] * stride + n[None, :], mask=mask, other=0.0)


@triton.jit
def load_rotation(rotations, live, pair, R):
    """Cosine and sine of the angles (L,M/2) of consecutive tokens; pairs from R on stay as they are."""
    at = rotations + 2 * R * tl.arange(0, live.shape[0])[:, None] + pair[None, :]
    mask = live[:, None] & (pair < R)[None, :]
    cos, sin = tl.load(at, mask=mask, other=1.0), tl.load(at + R, mask=mask, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def pairs_of(x):
    """(L,M) -> its even and its odd columns (L,M/2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def rotate(x, cos, sin):
    """Turns the adjacent pairs of x (L,M) by angles (L,M/2)."""
    even, odd = pairs_of(x)
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (x.shape[0], x.shape[1]))


@triton.jit
def cos_sin(turns):
    """Cosine and sine of an angle in [-1/2, 1/2] turns, each off by less than 2.5e-7.

    Minimax polynomials of half the angle, doubled: no table, and no slow path for large arguments.
    """
    s = turns * turns
    c = 2.550042152404785 + s * (-0.5980979800224304 + s * 0.07730873674154282)
    half_sin = turns * (3.141592502593994 + s * (-5.167707920074463 + s * c))
    c = -1.3352121114730835 + s * (0.23493756353855133 - s * 0.024396715685725212)
    half_cos = 1.0 + s * (-4.934802055358887 + s * (4.058709144592285 + s * c))
    # Each form of the cosine doubles an error; take the one whose error is small.
    cos = tl.where(s > 0.0625, 2 * half_cos * half_cos - 1, 1 - 2 * half_sin * half_sin)
    return cos, 2 * half_sin * half_cos


@triton.jit
def load_rotated(x, stride, bias, rotations, live, n, pair, N, R):
    """Rows of q or k of consecutive tokens, biased and rotated, in fp32 (L,M)."""
    cos, sin = load_rotation(rotations, live, pair, R)
    return rotate(load_rows(x, stride, live, n, N).to(tl.float32) + bias, cos, sin)


@triton.jit
def load_bias(bias, head, n, N):
    return tl.load(bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """A division is eight instructions, a squared reciprocal root two, and off by 2.5e-7."""
    if EXACT:
        return 1 / (1 + tl.exp(-x))
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def tanh(x):
    """The quotient cancels for small x: there a minimax polynomial, off by 1e-7 relatively."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    large = (1 - e) / (1 + e)
    s = x * x
    c = -0.05378813296556473 + s * (0.020809803158044815 - s * 0.005910614039748907)
    small = x + x * s * (-0.33333301544189453 + s * (0.13331978023052216 + s * c))
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit
def to_ticks(turns):
    """fp64 turns -> units of 2^-32 turns, modulo a whole turn, int32."""
    return tl.floor(turns * TWO_TO_32 + 0.5).to(tl.int64).to(tl.int32)


@triton.jit
def restart(begun, total, begins_here, value):
    """Scan operator on (flag, sum): a running sum that starts anew wherever the flag is set."""
    return begun | begins_here, tl.where(begins_here != 0, value, total + value)


@triton.jit
def load_decay(coefficients, spans, L: tl.constexpr):
    """Of one chunk: running log2 decay, its low part, first and last place of a place's document (L,)."""
    i = tl.arange(0, L)
    decay = tl.load(coefficients + i), tl.load(coefficients + L + i)
    return decay[0], decay[1], tl.load(spans + i), tl.load(spans + L + i)


@triton.jit
def decay_of(high, low, EXACT: tl.constexpr):
    """The low part is beyond what 16-bit operands can show."""
    if EXACT:
        return tl.exp2(high + low)
    return tl.exp2(high)


@triton.jit
def decay_from_entry(high, low, first, EXACT: tl.constexpr):
    """Decay of the state that enters a chunk, up to and including a place; 0 once a document has begun."""
    return tl.where(first < 0, decay_of(high, low, EXACT), 0.0)


@triton.jit
def decay_rows(high, low, first, EXACT: tl.constexpr):
    """Decay from after place j to i > j (L,L); 0 elsewhere, and where a document begins in between."""
    i = tl.arange(0, high.shape[0])
    decay = decay_of(high[:, None] - high[None, :], low[:, None] - low[None, :], EXACT)
    return tl.where((i[None, :] < i[:, None]) & (i[None, :] >= first[:, None]), decay, 0.0)


@triton.jit
def decay_to_exit(coefficients, high, low, last, L: tl.constexpr, EXACT: tl.constexpr):
    """Decay from after a place to the end of the chunk; 0 if a document begins in between."""
    high, low = tl.load(coefficients + L - 1) - high, tl.load(coefficients + 2 * L - 1) - low
    return tl.where(last == L - 1, decay_of(high, low, EXACT), 0.0)


@triton.jit
def decay_through(coefficients, spans, L: tl.constexpr, EXACT: tl.constexpr):
    """Decay of a state over the whole chunk; 0 if a document begins in it."""
    high, low = tl.load(coefficients + L - 1), tl.load(coefficients + 2 * L - 1)
    return decay_from_entry(high, low, tl.load(spans + L - 1), EXACT)


@triton.jit
def first_beta(dt, trap, b, T, H, head):
    """(1 - lam) dt of token 0: the weight of the given v_prev k_prev^T."""
    at = b.to(tl.int64) * T * H + head
    return tl.load(dt + at).to(tl.float32) / (1 + tl.exp(tl.load(trap + at).to(tl.float32)))


@triton.jit
def prepare_kernel(
    adt, dt, trap, doc_ids, coefficients, spans, T, C, H: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads, chunk, row): the per-token scalars, transposed.

    coefficients (B,H,C,4,L): the log2 decay summed from the start of the chunk or of the document, as the sum
    of two fp32; gamma = lam dt; scale = gamma + beta of the next token. spans (B,C,2,L): the places of the
    chunk at which the document of a place begins (-1: before the chunk) and ends. A decay is a difference of
    running sums. Summed in fp64, restarted with each document and kept in two parts, it is as exact as a sum
    of its own terms, and no bit of it hangs on another document.
    """
    c, b = tl.program_id(1), tl.program_id(2)
    i, h = tl.arange(0, L), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    t = c * CHUNK + i
    live = (i < CHUNK) & (t < T)
    start = live & begins(doc_ids, b, t, T)
    wanted = live[:, None] & (h < H)[None, :]
    followed = wanted & ((t < T - 1) & (begins(doc_ids, b, t + 1, T) == 0))[:, None]
    at = (b.to(tl.int64) * T + t[:, None]) * H + h[None, :]
    # A decay of 2^-256 is zero in fp32: clamping there changes nothing, and keeps -inf out of the sums.
    decay = tl.load(adt + at, mask=wanted, other=0.0).to(tl.float64) * LOG2E
    decay = tl.where(decay > -256.0, decay, -256.0)
    lam = 1 / (1 + tl.exp(-tl.load(trap + at, mask=wanted, other=0.0).to(tl.float64)))
    gamma = tl.load(dt + at, mask=wanted, other=0.0).to(tl.float64) * lam
    lam_opposite = 1 / (1 + tl.exp(tl.load(trap + at + H, mask=followed, other=0.0).to(tl.float64)))
    scale = gamma + tl.load(dt + at + H, mask=followed, other=0.0).to(tl.float64) * lam_opposite

    _, total = tl.associative_scan(((start[:, None] & wanted).to(tl.int32), decay), 0, restart)
    high = total.to(tl.float32)
    at = coefficients + ((b.to(tl.int64) * H + h[None, :]) * C + c) * (ROWS * L) + i[:, None]
    exists = (i >= 0)[:, None] & (h < H)[None, :]
    tl.store(at, high, mask=exists)
    tl.store(at + L, (total - high.to(tl.float64)).to(tl.float32), mask=exists)
    tl.store(at + 2 * L, gamma.to(tl.float32), mask=exists)
    tl.store(at + 3 * L, scale.to(tl.float32), mask=exists)
    if tl.program_id(0) == 0:
        opens = start[None, :] & (i[None, :] <= i[:, None])
        follows = start[None, :] & (i[None, :] > i[:, None])
        to = spans + (b * C + c) * 2 * L + i
        tl.store(to, tl.max(tl.where(opens, i[None, :], -1), 1))
        tl.store(to + L, tl.min(tl.where(follows, i[None, :], L), 1) - 1)


@triton.jit
def turn_kernel(
    angles, angle_strides, dt, doc_ids, theta, rotations, theta_final, T,
    H: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program per (head, row), along T: rotations (B,H,T,2,R), cosine and sine of a token's running angle.

    The angle is summed as 32-bit fixed point, in which a whole turn wraps around of itself: exact, in any order.
    """
    head, b = tl.program_id(0), tl.program_id(1)
    i, r = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    row = b.to(tl.int64) * H + head
    given = tl.load(theta + row * R + r, mask=r < R, other=0.0).to(tl.float64) / TAU
    carry = to_ticks(given - tl.floor(given))
    for t0 in range(0, T, BLOCK_T):
        t = t0 + i
        live = t < T
        rate = tl.load(dt + (b.to(tl.int64) * T + t) * H + head, mask=live, other=0.0).to(tl.float32)
        x = load_rows(angles + offset(angle_strides, b, t0, head), angle_strides[1], live, r, R)
        ticks = to_ticks((tanh(x.to(tl.float32)) * (0.5 * rate)[:, None]).to(tl.float64))
        start = (begins(doc_ids, b, t, T)[:, None] & (r >= 0)[None, :]).to(tl.int32)
        begun, total = tl.associative_scan((start, ticks), 0, restart)
        total += tl.where(begun != 0, 0, carry[None, :])
        cos, sin = cos_sin(total.to(tl.float32) / TWO_TO_32)
        at = rotations + (row * T + t[:, None]) * 2 * R + r[None, :]
        tl.store(at, cos.to(rotations.dtype.element_ty), mask=live[:, None] & (r < R)[None, :])
        tl.store(at + R, sin.to(rotations.dtype.element_ty), mask=live[:, None] & (r < R)[None, :])
        carry = tl.sum(tl.where((i == BLOCK_T - 1)[:, None], total, 0), 0)
    last = carry.to(tl.float64) / TWO_TO_32
    radians = ((last - tl.floor(last)) * TAU).to(tl.float32)
    # fp32 has no 2 pi: what rounds to its neighbour above is a whole turn, and that is 0.
    tl.store(theta_final + row * R + r, tl.where(radians < 6.2831852, radians, 0.0), mask=r < R)


@triton.jit
def state_kernel(
    k, k_strides, v, v_strides, k_bias, dt, trap, rotations, coefficients, spans, h_given, k_given, v_given,
    entering, h_final, k_final, v_final, T, C,
    H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, BLOCK_N state dims, row), along the chunks, the state in fp32 registers.

    entering (B,H,C,P,N) in v's dtype, as which the chunk products read it: the state before each chunk.
    """
    head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    p, i = tl.arange(0, BLOCK_P), tl.arange(0, L)
    EXACT: tl.constexpr = v.dtype.element_ty == tl.float32
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    bias = load_bias(k_bias, head, n, N)

    state = tl.load(h_given + row * P * N + at, mask=exists, other=0.0).to(tl.float32)
    key = tl.load(k_given + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
    state += first_beta(dt, trap, b, T, H, head) * value[:, None] * key[None, :]
    for c in range(C):
        chunk, t0 = row * C + c, c * CHUNK
        live = (i < CHUNK) & (t0 + i < T)
        tl.store(entering + chunk * P * N + at, state.to(entering.dtype.element_ty), mask=exists)
        here = coefficients + chunk * (ROWS * L)
        span = spans + (b * C + c) * 2 * L
        high, low, _, last = load_decay(here, span, L)
        weight = decay_to_exit(here, high, low, last, L, EXACT) * tl.load(here + 3 * L + i)
        at_k, turned = k + offset(k_strides, b, t0, group), rotations + (row * T + t0) * 2 * R
        keys = load_rotated(at_k, k_strides[1], bias, turned, live, n, pair, N, R)
        keys = (keys * weight[:, None]).to(v.dtype.element_ty)
        values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
        state *= decay_through(here, span, L, EXACT)
        state = tl.dot(tl.trans(values), keys, acc=state, input_precision=PRECISION)
    tl.store(h_final + row * P * N + at, state, mask=exists)

    one = tl.full((1,), True, tl.int1)
    at_k, turned = k + offset(k_strides, b, T - 1, group), rotations + (row * T + T - 1) * 2 * R
    key = load_rotated(at_k, 0, bias, turned, one, n, pair, N, R)
    tl.store(k_final + row * N + n[None, :], key, mask=(n < N)[None, :])
    if part == 0:
        last_value = tl.load(v + offset(v_strides, b, T - 1, head) + p, mask=p < P)
        tl.store(v_final + row * P + p, last_value.to(tl.float32), mask=p < P)


@triton.jit
def scan_kernel(
    q, q_strides, k, k_strides, v, v_strides, z, z_strides, q_bias, k_bias, D, rotations, coefficients, spans,
    entering, y, T, C,
    H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row): y. The heads of a group run side by side, so q and k come from L2.

    A token weighs gamma for itself and scale for those after it; no weight is taken off again.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    chunk, t0 = row * C + c, c * CHUNK
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    live = (i < CHUNK) & (t0 + i < T)
    EXACT: tl.constexpr = v.dtype.element_ty == tl.float32

    at_q, at_k = q + offset(q_strides, b, t0, group), k + offset(k_strides, b, t0, group)
    turned = rotations + (row * T + t0) * 2 * R
    queries = load_rotated(at_q, q_strides[1], load_bias(q_bias, head, n, N), turned, live, n, pair, N, R)
    queries = queries.to(v.dtype.element_ty)
    keys = load_rotated(at_k, k_strides[1], load_bias(k_bias, head, n, N), turned, live, n, pair, N, R)
    keys = keys.to(v.dtype.element_ty)

    at = chunk * P * N + p[:, None] * N + n[None, :]
    state = tl.load(entering + at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    here = coefficients + chunk * (ROWS * L)
    high, low, first, _ = load_decay(here, spans + (b * C + c) * 2 * L, L)
    out = tl.dot(queries, tl.trans(state), input_precision=PRECISION)
    out *= decay_from_entry(high, low, first, EXACT)[:, None]

    weight = decay_rows(high, low, first, EXACT) * tl.load(here + 3 * L + i)[None, :]
    weight = tl.where(i[:, None] == i[None, :], tl.load(here + 2 * L + i)[:, None], weight)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * weight
    values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
    out = tl.dot(scores.to(v.dtype.element_ty), values, acc=out, input_precision=PRECISION)

    out += tl.load(D + head).to(tl.float32) * values.to(tl.float32)
    gate = load_rows(z + offset(z_strides, b, t0, head), z_strides[1], live, p, P).to(tl.float32)
    at = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
    tl.store(y + at, out * gate * sigmoid(gate, EXACT), mask=live[:, None] & (p < P)[None, :])
