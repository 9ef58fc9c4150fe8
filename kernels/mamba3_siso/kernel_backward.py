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
    load_bias,
    load_decay,
    load_rotated,
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
    entering, dz, dqueries, dD, dturns, sums, T, C,
    H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row): what a token receives as a query.

    dqueries (B,T,H,N) in v's dtype, gradient of the biased query; dz, which holds the gate's slope before;
    dturns (B,H,T,R) fp32, the gradient of a token's own angle; dD (B,C,H).
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    chunk, t0 = row * C + c, c * CHUNK
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    live = (i < CHUNK) & (t0 + i < T)
    dtype: tl.constexpr = v.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    turned = rotations + (row * T + t0) * 2 * R
    cos, sin = load_rotation(turned, live, pair, R)
    queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32)
    keys = load_rows(k + offset(k_strides, b, t0, group), k_strides[1], live, n, N).to(tl.float32)
    values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
    douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)
    at = chunk * P * N + p[:, None] * N + n[None, :]
    state = tl.load(entering + at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    here = coefficients + chunk * (ROWS * L)
    high, low, first, _ = load_decay(here, spans + (b * C + c) * 2 * L, L)
    queries = rotate(queries + load_bias(q_bias, head, n, N), cos, sin).to(dtype)
    keys = rotate(keys + load_bias(k_bias, head, n, N), cos, sin).to(dtype)

    # out = since (Q S^T) + (scores weight) V, with gamma on the diagonal of weight, and then D v
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    dmixed = tl.dot(douts, tl.trans(values), input_precision=PRECISION)
    weight = decay_rows(high, low, first, EXACT) * tl.load(here + 3 * L + i)[None, :]
    ended = tl.sum(dmixed * scores * weight, 1)
    diagonal = i[:, None] == i[None, :]
    tl.store(sums + chunk * (SUMS * L) + DGAMMA * L + i, tl.sum(tl.where(diagonal, dmixed * scores, 0.0), 1))
    tl.store(dD + (b * C + c) * H + head, tl.sum(tl.where(diagonal, dmixed, 0.0)))
    weight = tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], weight)
    mixed = tl.where(diagonal, scores * weight + tl.load(D + head).to(tl.float32), scores * weight).to(dtype)
    dscores = (dmixed * weight).to(dtype)

    since = decay_from_entry(high, low, first, EXACT)[:, None]
    dq = tl.dot(douts, state, input_precision=PRECISION) * since
    tl.store(sums + chunk * (SUMS * L) + ENDED * L + i, ended + tl.sum(dq * queries.to(tl.float32), 1))
    dq = tl.dot(dscores, keys, acc=dq, input_precision=PRECISION)
    out = tl.dot(queries, tl.trans(state), input_precision=PRECISION) * since
    out = tl.dot(mixed, values, acc=out, input_precision=PRECISION)
    to = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
    stored = live[:, None] & (p < P)[None, :]
    tl.store(dz + to, out * tl.load(dz + to, mask=stored, other=0.0).to(tl.float32), mask=stored)

    to = dturns + (row * T + t0 + i[:, None]) * R + pair[None, :]
    tl.store(to, wedge(queries.to(tl.float32), dq), mask=live[:, None] & (pair < R)[None, :])
    cos, sin = load_rotation(turned, live, pair, R)
    to = dqueries + ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * N + n[None, :]
    tl.store(to, rotate(dq, cos, -sin), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def state_gradient_kernel(
    q, q_strides, dout, q_bias, dt, trap, rotations, coefficients, spans,
    h_final, k_final, k_given, v_given, dtheta_final, dh_final, dk_final,
    entering, leaving, carry, through, dh, dk_given, lifted, T, C, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, BLOCK_N state dims, row), along the chunks from the last, in fp32 registers.

    leaving (B,H,C,P,N) in v's dtype: gradient of the state after each chunk. carry (B,H,C,R): gradient of the
    angles of all tokens after a chunk that are in the document at its end. through (B,H,C,N/BLOCK_N): gradient
    of the log decay of a whole chunk; lifted (B,H,N/BLOCK_N,P): of beta_0 v_prev; both by parts of N.
    """
    head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    p, i = tl.arange(0, BLOCK_P), tl.arange(0, L)
    EXACT: tl.constexpr = dout.dtype.element_ty == tl.float32
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    bias = load_bias(q_bias, head, n, N)

    dstate = tl.load(dh_final + row * P * N + at, mask=exists, other=0.0).to(tl.float32)
    final_turn = tl.sum(wedge(tl.load(h_final + row * P * N + at, mask=exists, other=0.0), dstate), 0)
    one = tl.full((1,), True, tl.int1)
    last_key = load_rows(k_final + row * N, 0, one, n, N)
    final_turn += tl.sum(wedge(last_key, load_rows(dk_final + row * N, 0, one, n, N).to(tl.float32)), 0)
    final_turn += tl.load(dtheta_final + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
    after = tl.zeros((BLOCK_N // 2,), tl.float32)
    for back in range(C):
        c = C - 1 - back
        chunk, t0 = row * C + c, c * CHUNK
        live = (i < CHUNK) & (t0 + i < T)
        tl.store(leaving + chunk * P * N + at, dstate.to(leaving.dtype.element_ty), mask=exists)
        tl.store(carry + chunk * R + pair, after, mask=pair < R)
        here, span = coefficients + chunk * (ROWS * L), spans + (b * C + c) * 2 * L
        high, low, first, _ = load_decay(here, span, L)
        weight = decay_from_entry(high, low, first, EXACT)[:, None]
        at_q, turned = q + offset(q_strides, b, t0, group), rotations + (row * T + t0) * 2 * R
        queries = load_rotated(at_q, q_strides[1], bias, turned, live, n, pair, N, R)
        queries = (queries * weight).to(dout.dtype.element_ty)
        douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)
        state = tl.load(entering + chunk * P * N + at, mask=exists, other=0.0).to(tl.float32)
        dstate *= decay_through(here, span, L, EXACT)
        tl.store(through + chunk * tl.num_programs(1) + part, tl.sum(state * dstate))
        dstate = tl.dot(tl.trans(douts), queries, acc=dstate, input_precision=PRECISION)
        final_turn = tl.where(tl.load(span + L - 1) < 0, final_turn, 0.0)
        after = final_turn - tl.sum(wedge(state, dstate), 0)
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
    leaving, dtheta_final, dk_final, dv_final, dkeys, dv, dturns, sums, T, C,
    H: tl.constexpr, HEADS_A_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row): what a token receives as key and value.

    The products of the query kernel transposed, keys down and queries across. dkeys like dqueries there; dv; to
    dturns the keys' part is added.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    chunk, t0 = row * C + c, c * CHUNK
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    live = (i < CHUNK) & (t0 + i < T)
    dtype: tl.constexpr = v.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    turned = rotations + (row * T + t0) * 2 * R
    cos, sin = load_rotation(turned, live, pair, R)
    keys = load_rows(k + offset(k_strides, b, t0, group), k_strides[1], live, n, N).to(tl.float32)
    queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32)
    values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
    douts = load_rows(dout + ((b.to(tl.int64) * T + t0) * H + head) * P, H * P, live, p, P)
    at = chunk * P * N + p[:, None] * N + n[None, :]
    dstate = tl.load(leaving + at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    here = coefficients + chunk * (ROWS * L)
    high, low, _, last = load_decay(here, spans + (b * C + c) * 2 * L, L)
    scale = tl.load(here + 3 * L + i)
    keys = rotate(keys + load_bias(k_bias, head, n, N), cos, sin).to(dtype)
    queries = rotate(queries + load_bias(q_bias, head, n, N), cos, sin).to(dtype)

    scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    dmixed = tl.dot(values, tl.trans(douts), input_precision=PRECISION)
    weight = decay_columns(high, low, last, EXACT)
    weighted = tl.sum(dmixed * scores * weight, 1)
    diagonal = i[:, None] == i[None, :]
    weight = tl.where(diagonal, tl.load(here + 2 * L + i)[:, None], weight * scale[:, None])
    mixed = tl.where(diagonal, scores * weight + tl.load(D + head).to(tl.float32), scores * weight).to(dtype)
    dscores = (dmixed * weight).to(dtype)

    until = decay_to_exit(here, high, low, last, L, EXACT)
    dk = tl.dot(values, dstate, input_precision=PRECISION) * until[:, None]
    left = tl.sum(dk * keys.to(tl.float32), 1)
    to = sums + chunk * (SUMS * L) + i
    tl.store(to + BEGUN * L, weighted * scale)
    tl.store(to + LEFT * L, left * scale)
    tl.store(to + DSCALE * L, left + weighted)
    dk = tl.dot(dscores, queries, acc=dk * scale[:, None], input_precision=PRECISION)
    dvalues = tl.dot(keys, tl.trans(dstate), input_precision=PRECISION) * (until * scale)[:, None]
    dvalues = tl.dot(mixed, douts, acc=dvalues, input_precision=PRECISION)
    if c == C - 1:
        final = (live & (t0 + i == T - 1))[:, None]
        dvalues += tl.where(final, load_bias(dv_final, row, p, P), 0.0)
        dk += tl.where(final, load_bias(dk_final, row, n, N), 0.0)
    to = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
    tl.store(dv + to, dvalues, mask=live[:, None] & (p < P)[None, :])

    turn = wedge(keys.to(tl.float32), dk)
    if c == C - 1:
        final = (live & (t0 + i == T - 1))[:, None]
        turn += tl.where(final, load_bias(dtheta_final, row, pair, R), 0.0)
    to, stored = dturns + (row * T + t0 + i[:, None]) * R + pair[None, :], live[:, None] & (pair < R)[None, :]
    tl.store(to, tl.load(to, mask=stored, other=0.0) + turn, mask=stored)
    cos, sin = load_rotation(turned, live, pair, R)
    to = dkeys + ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * N + n[None, :]
    tl.store(to, rotate(dk, cos, -sin), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def head_sum_kernel(
    dheads, dgroups, dbias, T, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr,
    N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (group, TOKENS tokens, row): dq or dk from the heads' own; dbias (B,T/TOKENS,H,N) fp32."""
    group, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, t = tl.arange(0, BLOCK_N), block * TOKENS + tl.arange(0, TOKENS)
    exists = (t < T)[:, None] & (n < N)[None, :]
    token = (b.to(tl.int64) * T + t)[:, None]
    total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
    for head in range(group * HEADS_A_GROUP, group * HEADS_A_GROUP + HEADS_A_GROUP):
        own = tl.load(dheads + (token * H + head) * N + n[None, :], mask=exists, other=0.0).to(tl.float32)
        to = dbias + ((b * tl.num_programs(1) + block) * H + head) * N + n
        tl.store(to, tl.sum(own, 0), mask=n < N)
        total += own
    tl.store(dgroups + (token * tl.num_programs(0) + group) * N + n[None, :], total, mask=exists)


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
    decay = tl.sum(tl.where(same, pairs, 0.0), 0)
    for part in range(PARTS):
        decay += tl.load(through + chunk * PARTS + part)
    tl.store(dadt + at, tl.where(start, 0.0, decay), mask=live)

    logit = tl.load(trap + at, mask=live, other=0.0).to(tl.float32)
    lam, opposite = 1 / (1 + tl.exp(-logit)), 1 / (1 + tl.exp(logit))
    own = tl.load(here + DSCALE * L, mask=live, other=0.0) + tl.load(here + DGAMMA * L, mask=live, other=0.0)
    before = chunk * (SUMS * L) + DSCALE * L + tl.where(place > 0, place, CHUNK - SUMS * L) - 1
    dbeta = tl.load(sums + before, mask=live & (t > 0) & (start == 0), other=0.0)
    if c == 0:
        total = tl.zeros((BLOCK_P,), tl.float32)
        for part in range(PARTS):
            total += tl.load(lifted + (row * PARTS + part) * P + p, mask=p < P, other=0.0)
        tl.store(dv_given + row * P + p, first_beta(dt, trap, b, T, H, head) * total, mask=p < P)
        value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        dbeta += tl.where(t == 0, tl.sum(total * value), 0.0)
    tl.store(ddt + at, own * lam + dbeta * opposite + tl.sum(turn * x, 1), mask=live)
    tl.store(dtrap + at, (own - dbeta) * rate * lam * opposite, mask=live)
