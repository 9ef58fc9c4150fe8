"""Triton kernels of the mamba3_siso backward, in the order in which they run. Tile functions: kernel_forward.py.

Only the gradients of the state pass from chunk to chunk, from the end; all others are local to a chunk. This holds
even for the angles, though each rotates all later tokens: rotating the tokens after a border together with the state
that crosses it does not change y. The sum of their angle gradients is therefore the angle gradient of the final
state minus wedge(state, its gradient) at the border. Nothing is summed along T, so rounding errors do not grow with T.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.mamba3_siso.kernel_forward import (
    GAMMA,
    HIGH,
    ROWS,
    SCALE,
    SINCE,
    UNTIL,
    begins,
    cos_sin,
    decay_between,
    dot,
    first_beta,
    from_pairs,
    initial_state,
    load_row,
    load_state,
    load_tile,
    offset,
    pairs_of,
    running_sum,
    sigmoid,
    store_state,
    store_tile,
    tanh,
)

PI = tl.constexpr(3.141592653589793)
SUMS = tl.constexpr(3)  # of (B,H,C,3,L): gradients of the log decay, of scale and of gamma
DECAY, DSCALE, DGAMMA = (tl.constexpr(i) for i in range(3))


@triton.jit
def wedge(x, dx):
    """Gradient of the angles that rotate the pairs of x, from x and its gradient, summed over the rows (M/2,)."""
    even, odd = pairs_of(x.to(tl.float32))
    deven, dodd = pairs_of(dx.to(tl.float32))
    return tl.sum(even * dodd - odd * deven, 0)


@triton.jit
def before_gate(z, dy, EXACT: tl.constexpr):
    """Gradient of the output before its gate, y = out silu(z), in the dtype of dy."""
    x = z.to(tl.float32)
    return (dy.to(tl.float32) * x * sigmoid(x, EXACT)).to(dy.dtype)


@triton.jit
def state_kernel(
    keys_ptr, v_ptr, v_strides, coefficients_ptr, dt_ptr, trap_ptr, h_given_ptr, k_given_ptr, v_given_ptr,
    entering_ptr, h_final_ptr, T, C,
    H: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, row) loops over the chunks: entering (B,H,C,P,N) in v.dtype, the state before each."""
    head, b, i = tl.program_id(0), tl.program_id(1), tl.arange(0, L)
    row = b.to(tl.int64) * H + head
    state = initial_state(
        h_given_ptr, k_given_ptr, v_given_ptr, dt_ptr, trap_ptr, b, T, H, head, P, N, BLOCK_P, BLOCK_N
    )
    v_ptr += offset(v_strides, b, 0, head)
    keys_ptr += row * T * N
    coefficients_ptr += row * C * (ROWS * L)
    entering_ptr += row * C * P * N
    for c in range(C):
        count = tl.minimum(CHUNK, T - c * CHUNK)
        store_state(entering_ptr, P, N, BLOCK_P, BLOCK_N, state)
        value = load_tile(v_ptr, i, count, v_strides[1], P, BLOCK_P)
        key = load_tile(keys_ptr, i, count, N, N, BLOCK_N)
        weight = tl.load(coefficients_ptr + SCALE * L + i) * tl.load(coefficients_ptr + UNTIL * L + i)
        weighted = (value * weight[:, None]).to(value.dtype)
        state = dot(tl.trans(weighted), key, state * tl.load(coefficients_ptr + SINCE * L + L - 1))
        v_ptr += CHUNK * v_strides[1]
        keys_ptr += CHUNK * N
        coefficients_ptr += ROWS * L
        entering_ptr += P * N
    store_state(h_final_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N, state)


@triton.jit
def state_gradient_kernel(
    queries_ptr, z_ptr, z_strides, dy_ptr, dy_strides, coefficients_ptr, spans_ptr, dt_ptr, trap_ptr, h_final_ptr,
    k_final_ptr,
    k_given_ptr, v_given_ptr,
    dtheta_final_ptr, dh_final_ptr, dk_final_ptr, leaving_ptr, carry_ptr, dh_ptr, dk_given_ptr, lifted_ptr, T, C,
    H: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, row) loops over the chunks from the last to the first.

    leaving (B,H,C,P,N) in v.dtype: gradient of the state after each chunk. carry (B,H,C,R): the angle gradient of the
    final state, if the document at the end of a chunk is the last one; not written for the last chunk.
    lifted (B,H,P): gradient of beta_0 v_prev.
    """
    head, b, i = tl.program_id(0), tl.program_id(1), tl.arange(0, L)
    row = b.to(tl.int64) * H + head
    pair, one = tl.arange(0, BLOCK_N // 2), tl.arange(0, 1)
    EXACT: tl.constexpr = queries_ptr.dtype.element_ty == tl.float32
    dstate = load_state(dh_final_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N).to(tl.float32)
    turn = wedge(load_state(h_final_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N), dstate)
    last_key = load_tile(k_final_ptr + row * N, one, 1, N, N, BLOCK_N)
    turn += wedge(last_key, load_tile(dk_final_ptr + row * N, one, 1, N, N, BLOCK_N))
    turn += load_row(dtheta_final_ptr + row * R, R, BLOCK_N // 2)
    for back in range(C):
        c = C - 1 - back
        chunk, count = row * C + c, tl.minimum(CHUNK, T - c * CHUNK)
        t0 = c * CHUNK
        store_state(leaving_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N, dstate)
        since = coefficients_ptr + chunk * (ROWS * L) + SINCE * L
        gate = load_tile(z_ptr + offset(z_strides, b, t0, head), i, count, z_strides[1], P, BLOCK_P)
        dgated = load_tile(dy_ptr + offset(dy_strides, b, t0, head), i, count, dy_strides[1], P, BLOCK_P)
        douts = before_gate(gate, dgated, EXACT)
        query = load_tile(queries_ptr + (row * T + t0) * N, i, count, N, N, BLOCK_N)
        weighted = (douts * tl.load(since + i)[:, None]).to(douts.dtype)
        dstate = dot(tl.trans(weighted), query, dstate * tl.load(since + L - 1))
        turn = tl.where(tl.load(spans_ptr + (b * C + c) * 2 * L + L - 1) < 0, turn, 0.0)
        tl.store(carry_ptr + (chunk - 1) * R + pair, turn, mask=(pair < R) & (c > 0))
    store_state(dh_ptr + row * P * N, P, N, BLOCK_P, BLOCK_N, dstate)

    n, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    value, key = load_row(v_given_ptr + row * P, P, BLOCK_P), load_row(k_given_ptr + row * N, N, BLOCK_N)
    dkey = first_beta(dt_ptr, trap_ptr, b, T, H, head) * tl.sum(dstate * value[:, None], 0)
    tl.store(dk_given_ptr + row * N + n, dkey, mask=n < N)
    tl.store(lifted_ptr + row * P + p, tl.sum(dstate * key[None, :], 1), mask=p < P)


@triton.jit
def chunk_gradient_kernel(
    queries_ptr, keys_ptr, v_ptr, v_strides, z_ptr, z_strides, dy_ptr, dy_strides, D_ptr, coefficients_ptr, spans_ptr,
    entering_ptr, leaving_ptr, dk_final_ptr, dv_final_ptr,
    dqueries_ptr, dkeys_ptr, dv_ptr, dz_ptr, dD_ptr, sums_ptr, borders_ptr, T, C,
    H: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row): all products of a chunk, with keys along the rows, queries along the columns.

    dqueries and dkeys (B,H,T,N) in v.dtype, after rotation; dv; dz; dD (B,C,H); sums; borders (B,H,C,R), wedge(state,
    its gradient) where a chunk begins. The gradient of a log decay is the sum over the pairs s < t <= i that it lies
    between: a product with a triangle of ones forms it.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, i, pair = b.to(tl.int64) * H + head, tl.arange(0, L), tl.arange(0, BLOCK_N // 2)
    chunk, t0 = row * C + c, c * CHUNK
    count, token = tl.minimum(CHUNK, T - t0), b.to(tl.int64) * T + t0
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    coefficients_ptr += chunk * (ROWS * L)
    sums_ptr += chunk * (SUMS * L) + i
    at_value, at_key = (token * H + head) * P, (row * T + t0) * N
    scale = tl.load(coefficients_ptr + SCALE * L + i)
    total = tl.load(coefficients_ptr + SINCE * L + L - 1)
    gamma = tl.load(coefficients_ptr + GAMMA * L + i)
    high = tl.load(coefficients_ptr + HIGH * L + i)
    skip = tl.load(D_ptr + head).to(tl.float32)
    until, since = tl.load(coefficients_ptr + UNTIL * L + i), tl.load(coefficients_ptr + SINCE * L + i)
    last = tl.load(spans_ptr + (b * C + c) * 2 * L + L + i)
    x = load_tile(z_ptr + offset(z_strides, b, t0, head), i, count, z_strides[1], P, BLOCK_P).to(tl.float32)
    dy = load_tile(dy_ptr + offset(dy_strides, b, t0, head), i, count, dy_strides[1], P, BLOCK_P).to(
        tl.float32
    )
    value = load_tile(v_ptr + offset(v_strides, b, t0, head), i, count, v_strides[1], P, BLOCK_P)
    key = load_tile(keys_ptr + at_key, i, count, N, N, BLOCK_N)
    query = load_tile(queries_ptr + at_key, i, count, N, N, BLOCK_N)
    dstate = load_state(leaving_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N)
    state = load_state(entering_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N)
    # y = out silu(z). The buffers of dv and dz hold dout = dy silu(z) and the slope dy silu'(z) until they are used.
    gate = sigmoid(x, EXACT)
    store_tile(dv_ptr + at_value, i, count, H * P, P, BLOCK_P, dy * x * gate)
    store_tile(dz_ptr + at_value, i, count, H * P, P, BLOCK_P, dy * gate * (1 + x * (1 - gate)))
    tl.debug_barrier()  # a thread may load what another one stored
    douts = load_tile(dv_ptr + at_value, i, count, H * P, P, BLOCK_P)
    through = total * tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
    border = total * wedge(state, dstate)

    dmixed = dot(value, tl.trans(douts))
    scores = dot(key, tl.trans(query))
    diagonal = i[:, None] == i[None, :]
    tl.store(dD_ptr + (b * C + c) * H + head, tl.sum(tl.where(diagonal, dmixed, 0.0)))
    tl.store(sums_ptr + DGAMMA * L, tl.sum(tl.where(diagonal, dmixed * scores, 0.0), 1))
    later = (i[None, :] > i[:, None]) & (i[None, :] <= last[:, None])
    weight = tl.where(later, decay_between(coefficients_ptr, high, L, EXACT, 1), 0.0)
    weighted = dmixed * scores * weight
    dscale = tl.sum(weighted, 1)
    weight = tl.where(diagonal, gamma[:, None], weight * scale[:, None])
    dscores = (dmixed * weight).to(dtype)
    mixed = (scores * weight + tl.where(diagonal, skip, 0.0)).to(dtype)
    from_t = (i[:, None] >= i[None, :]).to(dtype)
    dlog = dot((weighted * scale[:, None]).to(dtype), from_t)
    dlog = tl.sum(tl.where(i[:, None] < i[None, :], dlog, 0.0), 0) + through

    out = dot(query, tl.trans(state)) * since[:, None]
    out = dot(tl.trans(mixed), value, out)
    slope = load_tile(dz_ptr + at_value, i, count, H * P, P, BLOCK_P)
    store_tile(dz_ptr + at_value, i, count, H * P, P, BLOCK_P, out * slope)
    dvalue = dot(key, tl.trans(dstate)) * (until * scale)[:, None]
    dvalue = dot(mixed, douts, dvalue)
    final = (t0 + i == T - 1)[:, None]
    if c == C - 1:
        dvalue += tl.where(final, load_row(dv_final_ptr + row * P, P, BLOCK_P)[None, :], 0.0)
    store_tile(dv_ptr + at_value, i, count, H * P, P, BLOCK_P, dvalue)

    dkey = dot(value, dstate) * until[:, None]
    left = tl.sum(dkey * load_tile(keys_ptr + at_key, i, count, N, N, BLOCK_N), 1)
    tl.store(sums_ptr + DSCALE * L, left + dscale)
    dkey = dot(dscores, query, dkey * scale[:, None])
    if c == C - 1:
        dkey += tl.where(final, load_row(dk_final_ptr + row * N, N, BLOCK_N)[None, :], 0.0)
    store_tile(dkeys_ptr + at_key, i, count, N, N, BLOCK_N, dkey)
    dquery = dot(douts, state) * since[:, None]
    again = load_tile(queries_ptr + at_key, i, count, N, N, BLOCK_N)
    entered = tl.sum(dquery * again, 1)
    tl.store(borders_ptr + chunk * R + pair, border - wedge(again, dquery), mask=pair < R)
    dquery = dot(tl.trans(dscores), key, dquery)
    store_tile(dqueries_ptr + at_key, i, count, N, N, BLOCK_N, dquery)
    crossing = tl.where(i[:, None] < i[None, :], (scale * left)[:, None], entered[:, None])
    tl.store(sums_ptr + DECAY * L, dlog + tl.sum(crossing, 0))


@triton.jit
def head_sum_kernel(
    dheads_ptr, turns_ptr, dgroups_ptr, dbias_ptr, B, T, H: tl.constexpr, HEADS_A_GROUP: tl.constexpr,
    PART: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """PART heads of one group on BLOCK_T tokens: rotate dqueries or dkeys (B,H,T,N) back and sum them.

    dgroups (parts,B,T,G,N) and dbias (B,blocks,H,N) are partial sums.
    """
    block, b, i = tl.program_id(0), tl.program_id(2), tl.arange(0, BLOCK_T)
    parts: tl.constexpr = (HEADS_A_GROUP + PART - 1) // PART
    groups: tl.constexpr = H // HEADS_A_GROUP
    REST: tl.constexpr = N - 2 * R
    part, group = tl.program_id(1) % parts, tl.program_id(1) // parts
    t0, r, rest = block * BLOCK_T, tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_REST)
    all_even, all_odd = tl.zeros((BLOCK_T, BLOCK_R), tl.float32), tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    all_rest = tl.zeros((BLOCK_T, BLOCK_REST), tl.float32)
    for h in tl.range(part * PART, tl.minimum(part * PART + PART, HEADS_A_GROUP), num_stages=3):
        head = group * HEADS_A_GROUP + h
        at = (b.to(tl.int64) * H + head) * T + t0
        ticks = load_tile(turns_ptr + at * R, i, T - t0, R, R, BLOCK_R)
        turned = load_tile(dheads_ptr + at * N, i, T - t0, N, 2 * R, 2 * BLOCK_R).to(tl.float32)
        own_rest = load_tile(dheads_ptr + at * N + 2 * R, i, T - t0, N, REST, BLOCK_REST).to(tl.float32)
        cos, sin = cos_sin(ticks)
        even, odd = pairs_of(turned)
        own_even, own_odd = even * cos + odd * sin, odd * cos - even * sin
        all_even += own_even
        all_odd += own_odd
        all_rest += own_rest
        to = dbias_ptr + ((b * tl.num_programs(0) + block) * H + head) * N
        tl.store(to + 2 * r, tl.sum(own_even, 0), mask=r < R)
        tl.store(to + 2 * r + 1, tl.sum(own_odd, 0), mask=r < R)
        tl.store(to + 2 * R + rest, tl.sum(own_rest, 0), mask=rest < REST)
    to = dgroups_ptr + (((part * B + b).to(tl.int64) * T + t0) * groups + group) * N
    store_tile(to, i, T - t0, groups * N, 2 * R, 2 * BLOCK_R, from_pairs(all_even, all_odd))
    store_tile(to + 2 * R, i, T - t0, groups * N, REST, BLOCK_REST, all_rest)


@triton.jit
def wedges(x, dx, rows, count, N, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """As `wedge`, but per row, for the rotated pairs (L,BLOCK_R)."""
    even, odd = pairs_of(load_tile(x, rows, count, N, 2 * R, 2 * BLOCK_R).to(tl.float32))
    deven, dodd = pairs_of(load_tile(dx, rows, count, N, 2 * R, 2 * BLOCK_R).to(tl.float32))
    return even * dodd - odd * deven


@triton.jit
def token_gradient_kernel(
    queries_ptr, keys_ptr, dqueries_ptr, dkeys_ptr, angles_ptr, angle_strides, dt_ptr, trap_ptr, doc_ids_ptr,
    spans_ptr, v_given_ptr, lifted_ptr, dtheta_final_ptr,
    sums_ptr, carry_ptr, borders_ptr, dangles_ptr, dadt_ptr, ddt_ptr, dtrap_ptr, dtheta_ptr, dv_given_ptr, T, C,
    H: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row), in reverse order, so that a sum over the tokens from t on is a scan.

    An angle rotates every later token of its document; scale_t = gamma_t + beta_{t+1}.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * H + head
    chunk, t0, i, r = row * C + c, c * CHUNK, tl.arange(0, L), tl.arange(0, BLOCK_R)
    place, count = CHUNK - 1 - i, tl.minimum(CHUNK, T - t0)
    t, live = t0 + place, (place >= 0) & (place < count)
    token, at = b.to(tl.int64) * T + t0, (row * T + t0) * N
    scalar, here = (token + place) * H + head, sums_ptr + chunk * (SUMS * L) + place
    start, closed = begins(doc_ids_ptr, b, t, T), begins(doc_ids_ptr, b, t + 1, T)
    last = tl.load(spans_ptr + (b * C + c) * 2 * L + L + place, mask=live, other=-1)
    # Issue all loads before the first store: after it they would wait for it.
    turn = wedges(queries_ptr + at, dqueries_ptr + at, place, count, N, R, BLOCK_R)
    turn += wedges(keys_ptr + at, dkeys_ptr + at, place, count, N, R, BLOCK_R)
    angle = load_tile(
        angles_ptr + offset(angle_strides, b, t0, head), place, count, angle_strides[1], R, BLOCK_R
    )
    inner = (r < R) & (c < C - 1)
    after = tl.load(carry_ptr + chunk * R + r, mask=inner, other=0.0)
    after -= tl.load(borders_ptr + (chunk + 1) * R + r, mask=inner, other=0.0)
    rate = tl.load(dt_ptr + scalar, mask=live, other=0.0).to(tl.float32)
    logit = tl.load(trap_ptr + scalar, mask=live, other=0.0).to(tl.float32)
    decay = tl.load(here + DECAY * L, mask=live, other=0.0)
    own = tl.load(here + DSCALE * L, mask=live, other=0.0) + tl.load(here + DGAMMA * L, mask=live, other=0.0)
    before = chunk * (SUMS * L) + DSCALE * L + tl.where(place > 0, place, CHUNK - SUMS * L) - 1
    dbeta = tl.load(sums_ptr + before, mask=live & (t > 0) & (start == 0), other=0.0)

    if c == C - 1:
        turn += tl.where(
            (t == T - 1)[:, None], load_row(dtheta_final_ptr + row * R, R, BLOCK_R)[None, :], 0.0
        )
    turn = running_sum(turn, closed)
    turn += tl.where(((last == L - 1) & (c < C - 1))[:, None], after[None, :], 0.0)
    if c == 0:
        tl.store(dtheta_ptr + row * R + r, tl.sum(tl.where((t == 0)[:, None], turn, 0.0), 0), mask=r < R)
    turn *= PI
    x = tanh(angle.to(tl.float32))
    dangle = turn * rate[:, None] * (1 - x * x)
    store_tile(dangles_ptr + (token * H + head) * R, place, count, H * R, R, BLOCK_R, dangle)

    tl.store(dadt_ptr + scalar, tl.where(start, 0.0, decay), mask=live)
    lam, opposite = 1 / (1 + tl.exp(-logit)), 1 / (1 + tl.exp(logit))
    if c == 0:
        p = tl.arange(0, BLOCK_P)
        lift, value = load_row(lifted_ptr + row * P, P, BLOCK_P), load_row(v_given_ptr + row * P, P, BLOCK_P)
        tl.store(dv_given_ptr + row * P + p, first_beta(dt_ptr, trap_ptr, b, T, H, head) * lift, mask=p < P)
        dbeta += tl.where(t == 0, tl.sum(lift * value), 0.0)
    tl.store(ddt_ptr + scalar, own * lam + dbeta * opposite + tl.sum(turn * x, 1), mask=live)
    tl.store(dtrap_ptr + scalar, (own - dbeta) * rate * lam * opposite, mask=live)
