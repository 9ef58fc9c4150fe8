"""Triton kernels of the mamba3_siso backward. The tile functions are the forward's.

Gradients of the state run through the chunks from the end (`state_gradient_kernel`); then every chunk stands
alone (`chunk_gradient_kernel`, `token_gradient_kernel`). Even the angles do, though each turns all that follows
it: turning the tokens after a border together with the state that crosses it changes no y, so the sum of their
angle gradients is what the final state receives less wedge(state, its gradient), taken at the border. Nothing is
summed along T, and no rounding error grows with it.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.mamba3_siso.kernel_forward import (
    PRECISION,
    ROWS,
    begins,
    cos_sin,
    decay_between,
    decay_from_entry,
    decay_to_exit,
    first_beta,
    load_decay,
    load_rows,
    offset,
    pairs_of,
    restart,
    rotate,
    tanh,
)

PI = tl.constexpr(3.141592653589793)


@triton.jit
def wedge(x, dx):
    """Gradient of the angles (L,M/2) that turn the pairs of x, from x and its gradient, both (L,M)."""
    even, odd = pairs_of(x)
    deven, dodd = pairs_of(dx)
    return even * dodd - odd * deven


@triton.jit
def state_gradient_kernel(
    q, q_strides, z, z_strides, dy, dy_strides, q_bias, dt, trap, turns, coefficients, segments,
    h_final, k_final, v_given, dtheta_final, dh_final, dk_final,
    leaving, carry, dh, dk_given, lifted, k_given, T, H, HEADS_A_GROUP, C, CHUNK,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (head, BLOCK_N state dims, row), along the chunks from the last, in fp32 registers.

    leaving (B,H,C,P,N) in v's dtype: gradient of the state after each chunk. carry (B,H,C,R): what the final
    state gives to the angles of the tokens after each chunk, where the last document has begun by then.
    lifted (B,H,N/BLOCK_N,P): sums over state dims of dh k_prev, the gradient of beta_0 v_prev.
    """
    head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, row = head // HEADS_A_GROUP, b.to(tl.int64) * H + head
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    p, i = tl.arange(0, BLOCK_P), tl.arange(0, L)
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    bias = tl.load(q_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]

    dstate = tl.load(dh_final + row * P * N + at, mask=exists, other=0.0).to(tl.float32)
    turned = tl.sum(wedge(tl.load(h_final + row * P * N + at, mask=exists, other=0.0), dstate), 0)
    one = tl.full((1,), True, tl.int1)
    key = load_rows(k_final + row * N, 0, one, n, N)
    turned += tl.sum(wedge(key, load_rows(dk_final + row * N, 0, one, n, N).to(tl.float32)), 0)
    turned += tl.load(dtheta_final + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
    turned *= C > 1
    for back in range(0, C):
        c = C - 1 - back
        chunk, t0 = row * C + c, c * CHUNK
        live = (i < CHUNK) & (t0 + i < T)
        tl.store(leaving + chunk * P * N + at, dstate.to(leaving.dtype.element_ty), mask=exists)
        tl.store(carry + chunk * R + pair, tl.where(back > 0, turned, 0.0), mask=pair < R)
        high, low, segment, high_end, low_end, segment_end = load_decay(
            coefficients + chunk * (ROWS * L), segments + (b * C + c) * L, L
        )
        weight = decay_from_entry(high, low, segment)[:, None]
        queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32) + bias
        cos, sin = cos_sin(load_rows(turns + (row * T + t0) * R, R, live, pair, R))
        queries = (rotate(queries, cos, sin) * weight).to(q.dtype.element_ty)
        gate = load_rows(z + offset(z_strides, b, t0, head), z_strides[1], live, p, P).to(tl.float32)
        dungated = load_rows(dy + offset(dy_strides, b, t0, head), dy_strides[1], live, p, P).to(tl.float32)
        dungated = (dungated * gate * tl.sigmoid(gate)).to(q.dtype.element_ty)
        dstate *= decay_from_entry(high_end, low_end, segment_end)
        dstate = tl.dot(tl.trans(dungated), queries, acc=dstate, input_precision=PRECISION)
        turned *= segment_end == 0
    tl.store(dh + row * P * N + at, dstate, mask=exists)

    beta = first_beta(dt, trap, b, T, H, head)
    value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
    tl.store(dk_given + row * N + n, beta * tl.sum(dstate * value[:, None], 0), mask=n < N)
    key = tl.load(k_given + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    to = lifted + (row * tl.num_programs(1) + part) * P + p
    tl.store(to, tl.sum(dstate * key[None, :], 1), mask=p < P)


@triton.jit
def chunk_gradient_kernel(
    q, q_strides, k, k_strides, v, v_strides, z, z_strides, dy, dy_strides, q_bias, k_bias, D,
    turns, coefficients, segments, entering, leaving, dtheta_final, dk_final, dv_final,
    dq, dk, dv, dadt, dz, dq_bias, dk_bias, dD, dturns, carry, dgamma, dscale,
    T, H, HEADS_A_GROUP, HEADS, C, CHUNK,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads of one group, chunk, row): dq and dk of those heads summed in registers.

    Per token, fp32: dv, dz and dadt finished; dturns (B,H,T,R), the gradient of the token's own angle; dgamma
    and dscale (B,H,C,L). Per chunk: dq_bias, dk_bias (B,C,H,N), dD (B,C,H), and carry (B,H,C,R) finished: the
    gradient of the angles of all later tokens of the document that the chunk ends in.
    """
    split, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, pair, p, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2), tl.arange(0, BLOCK_P), tl.arange(0, L)
    group, t0 = split * HEADS // HEADS_A_GROUP, c * CHUNK
    live = (i < CHUNK) & (t0 + i < T)
    final = (live & (t0 + i == T - 1))[:, None]
    diagonal = i[:, None] == i[None, :]
    at, exists = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    dq_sum = tl.zeros((L, BLOCK_N), tl.float32)
    dk_sum = tl.zeros((L, BLOCK_N), tl.float32)
    for head in range(split * HEADS, split * HEADS + HEADS):
        row = b.to(tl.int64) * H + head
        chunk = row * C + c
        here = coefficients + chunk * (ROWS * L)
        high, low, segment, high_end, low_end, segment_end = load_decay(here, segments + (b * C + c) * L, L)
        gamma, scale = tl.load(here + 2 * L + i), tl.load(here + 3 * L + i)
        since = decay_from_entry(high, low, segment)
        until = decay_to_exit(high, low, segment, high_end, low_end, segment_end)
        inside = decay_between(high, low, segment, i, i)

        cos, sin = cos_sin(load_rows(turns + (row * T + t0) * R, R, live, pair, R))
        queries = load_rows(q + offset(q_strides, b, t0, group), q_strides[1], live, n, N).to(tl.float32)
        queries += tl.load(q_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        queries = rotate(queries, cos, sin).to(v.dtype.element_ty)
        keys = load_rows(k + offset(k_strides, b, t0, group), k_strides[1], live, n, N).to(tl.float32)
        keys += tl.load(k_bias + head * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        keys = rotate(keys, cos, sin).to(v.dtype.element_ty)
        values = load_rows(v + offset(v_strides, b, t0, head), v_strides[1], live, p, P)
        state = tl.load(entering + chunk * P * N + at, mask=exists, other=0.0)
        dstate = tl.load(leaving + chunk * P * N + at, mask=exists, other=0.0)

        # y = (out + D v) silu(z), out = since (Q S^T) + (scores weight) V
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weight = tl.where(diagonal, gamma[None, :], inside * scale[None, :])
        mixed = (scores * weight).to(v.dtype.element_ty)
        out = tl.dot(queries, tl.trans(state), input_precision=PRECISION) * since[:, None]
        out = tl.dot(mixed, values, acc=out, input_precision=PRECISION)
        skip = tl.load(D + head).to(tl.float32)
        x = load_rows(z + offset(z_strides, b, t0, head), z_strides[1], live, p, P).to(tl.float32)
        dungated = load_rows(dy + offset(dy_strides, b, t0, head), dy_strides[1], live, p, P).to(tl.float32)
        gate = tl.sigmoid(x)
        to = ((b.to(tl.int64) * T + t0 + i[:, None]) * H + head) * P + p[None, :]
        stored = live[:, None] & (p < P)[None, :]
        out = (out + skip * values.to(tl.float32)) * dungated * gate * (1 + x * (1 - gate))
        tl.store(dz + to, out, mask=stored)
        dungated *= x * gate
        tl.store(dD + (b * C + c) * H + head, tl.sum(dungated * values.to(tl.float32)))
        dout = dungated.to(v.dtype.element_ty)

        # out backward, within the chunk
        dmixed = tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        product = dmixed * scores
        tl.store(dgamma + chunk * L + i, tl.sum(tl.where(diagonal, product, 0.0), 0))
        product *= inside
        weighted = tl.sum(product, 0)
        ended = tl.sum(product * scale[None, :], 1)
        dscores = (dmixed * weight).to(v.dtype.element_ty)

        # and across its borders
        dvalues = tl.dot(keys, tl.trans(dstate), input_precision=PRECISION) * (until * scale)[:, None]
        dvalues = tl.dot(tl.trans(mixed), dout, acc=dvalues, input_precision=PRECISION) + skip * dungated
        last_dv = tl.load(dv_final + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        tl.store(dv + to, dvalues + tl.where(final, last_dv[None, :], 0.0), mask=stored)
        dqueries = tl.dot(dout, state, input_precision=PRECISION) * since[:, None]
        ended += tl.sum(dqueries * queries.to(tl.float32), 1)
        dqueries = tl.dot(dscores, keys, acc=dqueries, input_precision=PRECISION)
        dkeys = tl.dot(values, dstate, input_precision=PRECISION) * until[:, None]
        left = tl.sum(dkeys * keys.to(tl.float32), 1)
        dkeys = tl.dot(tl.trans(dscores), queries, acc=dkeys * scale[:, None], input_precision=PRECISION)
        last_dk = tl.load(dk_final + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        dkeys += tl.where(final, last_dk[None, :], 0.0)
        tl.store(dscale + chunk * L + i, weighted + left)

        # The log decay of a token is in each pair that ends at it or later, less those that begin there, ...
        behind = ended - weighted * scale
        same = segment[:, None] == segment[None, :]
        later = tl.where(i[:, None] >= i[None, :], behind[:, None], (left * scale)[:, None])
        decay = tl.sum(tl.where(same, later, 0.0), 0)
        through = tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        decay += through * decay_from_entry(high_end, low_end, segment_end)
        start = segment != tl.load(segments + (b * C + c) * L + i - 1, mask=i > 0, other=0)
        to = (b.to(tl.int64) * T + t0 + i) * H + head
        tl.store(dadt + to, tl.where(start, 0.0, decay), mask=live)

        turn = wedge(queries.to(tl.float32), dqueries) + wedge(keys.to(tl.float32), dkeys)
        last_turn = tl.load(dtheta_final + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
        turn += tl.where(final, last_turn[None, :], 0.0)
        to = dturns + (row * T + t0 + i[:, None]) * R + pair[None, :]
        tl.store(to, turn, mask=live[:, None] & (pair < R)[None, :])
        state = tl.load(entering + (chunk + 1) * P * N + at, mask=exists & (c < C - 1), other=0.0)
        crossing = tl.sum(wedge(state.to(tl.float32), dstate.to(tl.float32)), 0)
        to = carry + chunk * R + pair
        tl.store(to, tl.load(to, mask=pair < R) - crossing, mask=pair < R)

        dqueries = rotate(dqueries, cos, -sin)
        dkeys = rotate(dkeys, cos, -sin)
        to = ((b * C + c) * H + head) * N + n
        tl.store(dq_bias + to, tl.sum(dqueries, 0), mask=n < N)
        tl.store(dk_bias + to, tl.sum(dkeys, 0), mask=n < N)
        dq_sum += dqueries
        dk_sum += dkeys
    to = ((b.to(tl.int64) * T + t0 + i[:, None]) * tl.num_programs(0) + split) * N + n[None, :]
    tl.store(dq + to, dq_sum, mask=live[:, None] & (n < N)[None, :])
    tl.store(dk + to, dk_sum, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def token_gradient_kernel(
    angles, angle_strides, dt, trap, doc_ids, segments, v_given, lifted, dturns, carry, dgamma, dscale,
    dangles, ddt, dtrap, dtheta, dv_given, T, H, C, CHUNK, PARTS,
    P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row), its places in reverse: a sum over the tokens from t on is then a scan.

    An angle turns every later token of its document; scale_t = gamma_t + beta_{t+1}.
    """
    head, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * H + head
    chunk, t0 = row * C + c, c * CHUNK
    i, r, p = tl.arange(0, L), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    place = CHUNK - 1 - i
    t = t0 + place
    live = (place >= 0) & (t < T)
    start, closed = begins(doc_ids, b, t, T), begins(doc_ids, b, t + 1, T)
    segment = tl.load(segments + (b * C + c) * L + place, mask=live, other=-1)
    segment_end = tl.load(segments + (b * C + c) * L + L - 1)

    turn = load_rows(dturns + (row * T + t0 + CHUNK - 1) * R, -R, live, r, R)
    _, turn = tl.associative_scan(((closed[:, None] & (r >= 0)[None, :]).to(tl.int32), turn), 0, restart)
    after = tl.load(carry + chunk * R + r, mask=r < R, other=0.0)
    turn += tl.where((segment == segment_end)[:, None], after[None, :], 0.0)
    if c == 0:
        tl.store(dtheta + row * R + r, tl.sum(tl.where((t == 0)[:, None], turn, 0.0), 0), mask=r < R)
    turn *= PI
    first = angles + offset(angle_strides, b, t0, head) + (CHUNK - 1) * angle_strides[1]
    x = tanh(load_rows(first, -angle_strides[1], live, r, R).to(tl.float32))
    at = (b.to(tl.int64) * T + t) * H + head
    rate = tl.load(dt + at, mask=live, other=0.0).to(tl.float32)
    to = at[:, None] * R + r[None, :]
    tl.store(dangles + to, turn * rate[:, None] * (1 - x * x), mask=live[:, None] & (r < R)[None, :])

    logit = tl.load(trap + at, mask=live, other=0.0).to(tl.float32)
    lam, opposite = 1 / (1 + tl.exp(-logit)), 1 / (1 + tl.exp(logit))
    own = tl.load(dscale + chunk * L + place, mask=live, other=0.0)
    own += tl.load(dgamma + chunk * L + place, mask=live, other=0.0)
    before = tl.where(place > 0, chunk * L + place, chunk * L - L + CHUNK) - 1
    dbeta = tl.load(dscale + before, mask=live & (t > 0) & (start == 0), other=0.0)
    if c == 0:
        total = tl.zeros((BLOCK_P,), tl.float32)
        for part in range(0, PARTS):
            total += tl.load(lifted + (row * PARTS + part) * P + p, mask=p < P, other=0.0)
        tl.store(dv_given + row * P + p, first_beta(dt, trap, b, T, H, head) * total, mask=p < P)
        value = tl.load(v_given + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        dbeta += tl.where(t == 0, tl.sum(total * value), 0.0)
    tl.store(ddt + at, own * lam + dbeta * opposite + tl.sum(turn * x, 1), mask=live)
    tl.store(dtrap + at, (own - dbeta) * rate * lam * opposite, mask=live)
