"""Triton kernels of the mamba3_siso backward, in the order in which they run. The tile functions are the forward's.

Gradients of the state run through the chunks from the end; all else stands alone in its chunk. Even the angles
do, though each turns all that follows it: to turn the tokens after a border together with the state that crosses
it changes no y. So the sum of their angle gradients is what the final state receives, less
wedge(state, its gradient) at the border. Nothing is summed along T, and no rounding error grows with it.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.mamba3_siso.kernel_forward import (
    PRECISION,
    ROWS,
    begins,
    decay_from_entry,
    decay_of,
    decay_rows,
    decay_through,
    decay_to_exit,
    first_beta,
    load_decay,
    load_rotation,
    load_rows,
    offset,
    pairs_of,
    restart,
    rotate,
    sigmoid,
    tanh,
)

PI = tl.constexpr(3.141592653589793)
SUMS = tl.constexpr(5)  # of (B,H,C,5,L): what the token kernel needs of the chunk products, row by row
ENDED = tl.constexpr(0)  # gradient of the log decay from all pairs of tokens that end at a place
DGAMMA = tl.constexpr(1)
BEGUN = tl.constexpr(2)  # gradient of the log decay from all pairs that begin at a place and end in the chunk
LEFT = tl.constexpr(3)  # the same, of those that end after the chunk
DSCALE = tl.constexpr(4)


@triton.jit
def wedge(x, dx):
    """Gradient of the angles (L,M/2) that turn the pairs of x, from x and its gradient, both (L,M)."""
    even, odd = pairs_of(x)
    deven, dodd = pairs_of(dx)
    return even * dodd - odd * deven


@triton.jit
def decay_columns(high, low, last, EXACT: tl.constexpr):
    """Decay from after place i to j > i (L,L); 0 elsewhere, and where a document begins in between."""
    i = tl.arange(0, high.shape[0])
    decay = decay_of(high[None, :] - high[:, None], low[None, :] - low[:, None], EXACT)
    return tl.where((i[None, :] > i[:, None]) & (i[None, :] <= last[:, None]), decay, 0.0)


@triton.jit
def gate_gradient_kernel(z, z_strides, dy, dy_strides, dout, slope, T, H: tl.constexpr, P: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """One program per (TOKENS tokens, head, row). y = ungated silu(z): dout = dy silu(z), slope = dy silu'(z)."""
    head, t0, b = tl.program_id(0), tl.program_id(1) * TOKENS, tl.program_id(2)
    i, p = tl.arange(0, TOKENS), tl.arange(0, BLOCK_P)
    live = t0 + i < T
    x = load_rows(z + offset(z_strides, b, t0, head), z_strides[1], live, p, P).to(tl.float32)
    dgated = load_rows(dy + offset(dy_strides, b, t0, head), dy_strides[1], live, p, P).to(tl.float32)
    gate = sigmoid(x, EXACT)
    to = ((tl.cast(b, tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
    stored = live[:, None] & (p < P)[None, :]
    tl.store(dout + to, dgated * x * gate, mask=stored)
    tl.store(slope + to, dgated * gate * (1 + x * (1 - gate)), mask=stored)


@triton.jit
def query_gradient_kernel(
    q, q_strides, k, k_strides, v, v_strides, dout, q_bias, k_bias, D, rotations, coefficients, spans,
    entering, dz, dq, dq_bias, dD, dturns, sums,
    T, C, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads of one group, chunk, row): what a token receives as a query.

    dq (B,T,splits,N) fp32, summed over the heads in registers; dz, which holds the gate's slope before; dturns
    (B,H,T,R) fp32, the gradient of a token's own angle; per chunk dq_bias (B,C,H,N) and dD (B,C,H).
    """
    split, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    group, t0 = split * HEADS // HEADS_A_GROUP, c * CHUNK
    live = (i < CHUNK) & (t0 + i < T)
    dtype: tl.constexpr = v.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    total = tl.zeros((L, BLOCK_N), tl.float32)
    for j in range(0, HEADS):
        head = split * HEADS + (j + c) % HEADS
        row = b.to(tl.int64) * H + head
        chunk = row * C + c
        here = coefficients + chunk * (ROWS * L)
        cos, sin = load_rotation(rotations + (row * T + t0) * 2 * R, live, pair, R)
        queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32)
        queries += tl.load(q_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        queries = rotate(queries, cos, sin).to(dtype)
        keys = load_rows(k + offset(k_strides, b, t0, group), k_strides[1], live, n, N).to(tl.float32)
        keys += tl.load(k_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        keys = rotate(keys, cos, sin).to(dtype)
        values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
        at = chunk * P * N + p[:, None] * N + n[None, :]
        state = tl.load(entering + at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)

        douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)

        span = spans + (b * C + c) * 2 * L
        diagonal = i[:, None] == i[None, :]

        # out = since (Q S^T) + (scores weight) V, with gamma on the diagonal of weight, and then D v
        high, low, first, _ = load_decay(here, span, L)
        out = tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        out *= decay_from_entry(high, low, first, EXACT)[:, None]
        weight = decay_rows(high, low, first, EXACT) * tl.load(here + 3 * L + i)[None, :]
        weight = tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], weight)
        mixed = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * weight
        mixed = tl.where(diagonal, mixed + tl.load(D + head).to(tl.float32), mixed)
        out = tl.dot(mixed.to(dtype), values, acc=out, input_precision=PRECISION)
        to = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
        stored = live[:, None] & (p < P)[None, :]
        tl.store(dz + to, out * tl.load(dz + to, mask=stored, other=0.0).to(tl.float32), mask=stored)

        # Products and decays are made anew: kept, they would not fit in registers beside the gradients.
        high, low, first, _ = load_decay(here, span, L)
        weight = decay_rows(high, low, first, EXACT) * tl.load(here + 3 * L + i)[None, :]
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        dmixed = tl.dot(douts, tl.trans(values), input_precision=PRECISION)
        to_sums = sums + chunk * (SUMS * L) + i
        tl.store(dD + (b * C + c) * H + head, tl.sum(tl.where(diagonal, dmixed, 0.0)))
        product = dmixed * scores
        tl.store(to_sums + DGAMMA * L, tl.sum(tl.where(diagonal, product, 0.0), 1))
        ended = tl.sum(product * weight, 1)
        dscores = dmixed * tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], weight)
        dqueries = tl.dot(douts, state, input_precision=PRECISION)
        dqueries *= decay_from_entry(high, low, first, EXACT)[:, None]
        ended += tl.sum(dqueries * queries.to(tl.float32), 1)
        tl.store(to_sums + ENDED * L, ended)
        dqueries = tl.dot(dscores.to(dtype), keys, acc=dqueries, input_precision=PRECISION)
        to = dturns + (row * T + t0 + i[:, None]) * R + pair[None, :]
        tl.store(to, wedge(queries.to(tl.float32), dqueries), mask=live[:, None] & (pair < R)[None, :])
        cos, sin = load_rotation(rotations + (row * T + t0) * 2 * R, live, pair, R)
        dqueries = rotate(dqueries, cos, -sin)
        tl.store(dq_bias + ((b * C + c) * H + head) * N + n, tl.sum(dqueries, 0), mask=n < N)
        total += dqueries
    to = ((b.to(tl.int64) * T + t0 + i[:, None]) * tl.num_programs(0) + split) * N + n[None, :]
    tl.store(dq + to, total, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def state_gradient_kernel(
    q, q_strides, dout, q_bias, dt, trap, rotations, coefficients, spans,
    h_final, k_final, k_given, v_given, dtheta_final, dh_final, dk_final,
    leaving, carry, dh, dk_given, lifted, T, C, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, BLOCK_N state dims, row), along the chunks from the last, in fp32 registers.

    leaving (B,H,C,P,N) in v's dtype: gradient of the state after each chunk. carry (B,H,C,R): what the final
    state gives to the angles after each chunk, where the last document has begun by then. lifted
    (B,H,N/BLOCK_N,P): sums over state dims of dh k_prev.
    """
    head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    p, i = tl.arange(0, BLOCK_P), tl.arange(0, L)
    EXACT: tl.constexpr = dout.dtype.element_ty == tl.float32
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    bias = tl.load(q_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]

    dstate = tl.load(dh_final + row * P * N + at, mask=exists, other=0.0).to(tl.float32)
    turned = tl.sum(wedge(tl.load(h_final + row * P * N + at, mask=exists, other=0.0), dstate), 0)
    one = tl.full((1,), True, tl.int1)
    last_key = load_rows(k_final + row * N, 0, one, n, N)
    turned += tl.sum(wedge(last_key, load_rows(dk_final + row * N, 0, one, n, N).to(tl.float32)), 0)
    turned += tl.load(dtheta_final + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
    for back in range(0, C):
        c = C - 1 - back
        chunk, t0 = row * C + c, c * CHUNK
        live = (i < CHUNK) & (t0 + i < T)
        tl.store(leaving + chunk * P * N + at, dstate.to(leaving.dtype.element_ty), mask=exists)
        tl.store(carry + chunk * R + pair, tl.where(back > 0, turned, 0.0), mask=pair < R)
        here, span = coefficients + chunk * (ROWS * L), spans + (b * C + c) * 2 * L
        high, low, first, _ = load_decay(here, span, L)
        weight = decay_from_entry(high, low, first, EXACT)[:, None]
        queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32) + bias
        cos, sin = load_rotation(rotations + (row * T + t0) * 2 * R, live, pair, R)
        queries = (rotate(queries, cos, sin) * weight).to(dout.dtype.element_ty)
        douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)
        dstate *= decay_through(here, span, L, EXACT)
        dstate = tl.dot(tl.trans(douts), queries, acc=dstate, input_precision=PRECISION)
        turned = tl.where(tl.load(span + L - 1) < 0, turned, 0.0)
    tl.store(dh + row * P * N + at, dstate, mask=exists)

    value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
    dkey = first_beta(dt, trap, b, T, H, head) * tl.sum(dstate * value[:, None], 0)
    tl.store(dk_given + row * N + n, dkey, mask=n < N)
    key = tl.load(k_given + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    to = lifted + (row * tl.num_programs(1) + part) * P + p
    tl.store(to, tl.sum(dstate * key[None, :], 1), mask=p < P)


@triton.jit
def key_gradient_kernel(
    q, q_strides, k, k_strides, v, v_strides, dout, q_bias, k_bias, D, rotations, coefficients, spans,
    entering, leaving, dtheta_final, dk_final, dv_final, dk, dk_bias, dv, dturns, carry, through, sums,
    T, C, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads of one group, chunk, row): what a token receives as key and value.

    The products are transposed, keys down and queries across. dk, dk_bias and dv like dq, dq_bias and dout of
    the query kernel; to dturns the keys' part is added. through (B,H,C): gradient of the log decay of the whole
    chunk. carry then holds the gradient of the angles of all later tokens of the document at the chunk's end.
    """
    split, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    group, t0 = split * HEADS // HEADS_A_GROUP, c * CHUNK
    live = (i < CHUNK) & (t0 + i < T)
    final = (live & (t0 + i == T - 1))[:, None]
    dtype: tl.constexpr = v.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    total = tl.zeros((L, BLOCK_N), tl.float32)
    for j in range(0, HEADS):
        head = split * HEADS + (j + c) % HEADS
        row = b.to(tl.int64) * H + head
        chunk = row * C + c
        here, span = coefficients + chunk * (ROWS * L), spans + (b * C + c) * 2 * L
        cos, sin = load_rotation(rotations + (row * T + t0) * 2 * R, live, pair, R)
        queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32)
        queries += tl.load(q_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        queries = rotate(queries, cos, sin).to(dtype)
        keys = load_rows(k + offset(k_strides, b, t0, group), k_strides[1], live, n, N).to(tl.float32)
        keys += tl.load(k_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        keys = rotate(keys, cos, sin).to(dtype)
        values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
        douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)
        dstate = tl.load(leaving + chunk * P * N + at, mask=exists, other=0.0)

        diagonal = i[:, None] == i[None, :]

        high, low, _, last = load_decay(here, span, L)
        scale = tl.load(here + 3 * L + i)
        dvalues = tl.dot(keys, tl.trans(dstate), input_precision=PRECISION)
        dvalues *= (decay_to_exit(here, high, low, last, L, EXACT) * scale)[:, None]
        weight = decay_columns(high, low, last, EXACT) * scale[:, None]
        weight = tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], weight)
        mixed = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * weight
        mixed = tl.where(diagonal, mixed + tl.load(D + head).to(tl.float32), mixed)
        dvalues = tl.dot(mixed.to(dtype), douts, acc=dvalues, input_precision=PRECISION)
        last_dv = tl.load(dv_final + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        to = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
        tl.store(dv + to, dvalues + tl.where(final, last_dv[None, :], 0.0), mask=live[:, None] & (p < P)[None, :])

        # Products and decays are made anew, as in the query kernel.
        high, low, _, last = load_decay(here, span, L)
        scale = tl.load(here + 3 * L + i)
        decay = decay_columns(high, low, last, EXACT)
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        dmixed = tl.dot(values, tl.trans(douts), input_precision=PRECISION)
        weighted = tl.sum(dmixed * scores * decay, 1)
        to_sums = sums + chunk * (SUMS * L) + i
        tl.store(to_sums + BEGUN * L, weighted * scale)
        dscores = dmixed * tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], decay * scale[:, None])
        dkeys = tl.dot(values, dstate, input_precision=PRECISION)
        dkeys *= decay_to_exit(here, high, low, last, L, EXACT)[:, None]
        left = tl.sum(dkeys * keys.to(tl.float32), 1)
        tl.store(to_sums + LEFT * L, left * scale)
        tl.store(to_sums + DSCALE * L, left + weighted)
        dkeys = tl.dot(dscores.to(dtype), queries, acc=dkeys * scale[:, None], input_precision=PRECISION)
        last_dk = tl.load(dk_final + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        dkeys += tl.where(final, last_dk[None, :], 0.0)
        last_turn = tl.load(dtheta_final + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
        turn = wedge(keys.to(tl.float32), dkeys) + tl.where(final, last_turn[None, :], 0.0)
        to, stored = dturns + (row * T + t0 + i[:, None]) * R + pair[None, :], live[:, None] & (pair < R)[None, :]
        tl.store(to, tl.load(to, mask=stored, other=0.0) + turn, mask=stored)
        cos, sin = load_rotation(rotations + (row * T + t0) * 2 * R, live, pair, R)
        dkeys = rotate(dkeys, cos, -sin)
        tl.store(dk_bias + ((b * C + c) * H + head) * N + n, tl.sum(dkeys, 0), mask=n < N)
        total += dkeys

        dstate = dstate.to(tl.float32)
        state = tl.load(entering + chunk * P * N + at, mask=exists, other=0.0).to(tl.float32)
        tl.store(through + chunk, tl.sum(state * dstate) * decay_through(here, span, L, EXACT))
        state = tl.load(entering + (chunk + 1) * P * N + at, mask=exists & (c < C - 1), other=0.0)
        crossing = tl.sum(wedge(state.to(tl.float32), dstate), 0)
        to = carry + chunk * R + pair
        tl.store(to, tl.load(to, mask=pair < R, other=0.0) - crossing, mask=pair < R)
    to = ((b.to(tl.int64) * T + t0 + i[:, None]) * tl.num_programs(0) + split) * N + n[None, :]
    tl.store(dk + to, total, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def token_gradient_kernel(
    angles, angle_strides, dt, trap, doc_ids, spans, v_given, lifted, dturns, carry, through, sums,
    dangles, dadt, ddt, dtrap, dtheta, dv_given, T, C, PARTS, H: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row), its places in reverse: a sum over the tokens from t on is then a scan.

    An angle turns every later token of its document; a log decay lies in each pair s < t <= i of places, in
    what enters before t and what leaves after it; scale_t = gamma_t + beta_{t+1}.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * H + head
    chunk, t0 = row * C + c, c * CHUNK
    i, r, p = tl.arange(0, L), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    place = CHUNK - 1 - i
    t = t0 + place
    live = (place >= 0) & (t < T)
    start, closed = begins(doc_ids, b, t, T), begins(doc_ids, b, t + 1, T)
    span = spans + (b * C + c) * 2 * L
    first = tl.load(span + place, mask=live, other=L)
    last = tl.load(span + L + place, mask=live, other=-1)

    turn = load_rows(dturns + (row * T + t0 + CHUNK - 1) * R, -R, live, r, R)
    _, turn = tl.associative_scan(((closed[:, None] & (r >= 0)[None, :]).to(tl.int32), turn), 0, restart)
    after = tl.load(carry + chunk * R + r, mask=r < R, other=0.0)
    turn += tl.where((last == L - 1)[:, None], after[None, :], 0.0)
    if c == 0:
        tl.store(dtheta + row * R + r, tl.sum(tl.where((t == 0)[:, None], turn, 0.0), 0), mask=r < R)
    turn *= PI
    angle = angles + offset(angle_strides, b, t0, head) + (CHUNK - 1) * angle_strides[1]
    x = tanh(load_rows(angle, -angle_strides[1], live, r, R).to(tl.float32))
    at = (b.to(tl.int64) * T + t) * H + head
    rate = tl.load(dt + at, mask=live, other=0.0).to(tl.float32)
    to = at[:, None] * R + r[None, :]
    tl.store(dangles + to, turn * rate[:, None] * (1 - x * x), mask=live[:, None] & (r < R)[None, :])

    here = sums + chunk * (SUMS * L) + place
    ended = tl.load(here + ENDED * L, mask=live, other=0.0) - tl.load(here + BEGUN * L, mask=live, other=0.0)
    left = tl.load(here + LEFT * L, mask=live, other=0.0)
    pairs = tl.where(place[:, None] >= place[None, :], ended[:, None], left[:, None])
    same = (place[:, None] >= first[None, :]) & (place[:, None] <= last[None, :])
    decay = tl.sum(tl.where(same, pairs, 0.0), 0) + tl.load(through + chunk)
    tl.store(dadt + at, tl.where(start, 0.0, decay), mask=live)

    logit = tl.load(trap + at, mask=live, other=0.0).to(tl.float32)
    lam, opposite = 1 / (1 + tl.exp(-logit)), 1 / (1 + tl.exp(logit))
    own = tl.load(here + DSCALE * L, mask=live, other=0.0) + tl.load(here + DGAMMA * L, mask=live, other=0.0)
    before = chunk * (SUMS * L) + DSCALE * L + tl.where(place > 0, place, CHUNK - SUMS * L) - 1
    dbeta = tl.load(sums + before, mask=live & (t > 0) & (start == 0), other=0.0)
    if c == 0:
        total = tl.zeros((BLOCK_P,), tl.float32)
        for part in range(0, PARTS):
            total += tl.load(lifted + (row * PARTS + part) * P + p, mask=p < P, other=0.0)
        tl.store(dv_given + row * P + p, first_beta(dt, trap, b, T, H, head) * total, mask=p < P)
        value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        dbeta += tl.where(t == 0, tl.sum(total * value), 0.0)
    tl.store(ddt + at, own * lam + dbeta * opposite + tl.sum(turn * x, 1), mask=live)
    tl.store(dtrap + at, (own - dbeta) * rate * lam * opposite, mask=live)
