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
    restart,
    rotate,
    tanh,
    wedge,
)

PI = tl.constexpr(3.141592653589793)


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
    final = (t0 + i == T - 1)[:, None]
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
        begun_here = tl.sum(product, 0)
        log_decay = tl.sum(product * scale[None, :], 1)
        dscores = (dmixed * weight).to(v.dtype.element_ty)

        # and across its borders
        dvalues = tl.dot(keys, tl.trans(dstate), input_precision=PRECISION) * (until * scale)[:, None]
        dvalues = tl.dot(tl.trans(mixed), dout, acc=dvalues, input_precision=PRECISION) + skip * dungated
        last_dv = tl.load(dv_final + row * P + p, mask=p < P, other=0.0).to(tl.float32)
        tl.store(dv + to, dvalues + tl.where(final, last_dv[None, :], 0.0), mask=stored)

        dqueries = tl.dot(dout, state, input_precision=PRECISION) * since[:, None]
        log_decay += tl.sum(dqueries * queries.to(tl.float32), 1)
        dqueries = tl.dot(dscores, keys, acc=dqueries, input_precision=PRECISION)
        dkeys = tl.dot(values, dstate, input_precision=PRECISION) * until[:, None]
        left = tl.sum(dkeys * keys.to(tl.float32), 1)
        dkeys = tl.dot(tl.trans(dscores), queries, acc=dkeys * scale[:, None], input_precision=PRECISION)
        last_dk = tl.load(dk_final + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        dkeys += tl.where(final, last_dk[None, :], 0.0)
        tl.store(dscale + chunk * L + i, begun_here + left)

        # a_t is in every pair of places s < t <= i, in what entered before t and what left after it
        same = segment[:, None] == segment[None, :]
        ended = tl.sum(tl.where(same & (i[:, None] >= i[None, :]), log_decay[:, None], 0.0), 0)
        begun = tl.sum(tl.where(same & (i[:, None] >= i[None, :]), (begun_here * scale)[None, :] * 0, 0.0), 0)
        through = tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        through *= decay_from_entry(high_end, low_end, segment_end)
        tl.store(dadt + (b.to(tl.int64) * T + t0 + i) * H + head, ended + begun + through, mask=live)
