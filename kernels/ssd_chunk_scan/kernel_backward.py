"""Triton kernels of the ssd_chunk_scan backward: gradients per head, and gradients summed over a group's heads.

Both process every chunk independently, and both recompute (s,t)-shaped tiles with s along the rows: no product of a
head then needs a transposed operand.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R = H/G heads per group, L tokens per tile, C chunks of
CHUNK <= L tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ssd_chunk_scan.kernel_forward import decay_between, dot, load_state, load_tile, store_tile, trace


@triton.jit
def decay_inside(decays_ptr, spans_ptr, i):
    """Decay from after token s, along the columns, to token t (L,L); 0 for t < s and across documents."""
    decay, first = tl.load(decays_ptr + i), tl.load(spans_ptr + i)
    connected = (i[None, :] <= i[:, None]) & (i[None, :] >= first[:, None])
    return decay_between(decay[:, None], decay[None, :], connected)


@triton.jit
def head_gradient_kernel(
    x_ptr, key_ptr, query_ptr, dy_ptr, A_ptr, D_ptr, decays_ptr, gates_ptr, spans_ptr, states_ptr, dstates_ptr,
    dx_ptr, ddt_ptr, dA_ptr, dD_ptr, T, C, CHUNK,
    x_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One program per (head, chunk, row): dx, ddt, and dA and dD (B,C,H), partial sums."""
    h, c, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), tl.arange(0, L)
    chunk, count, token = (b * H + h) * C + c, tl.minimum(CHUNK, T - c * CHUNK), b * T + c * CHUNK
    gate = gates_ptr + chunk * 3 * L
    value = load_tile(x_ptr + token * x_stride + h * P, i, count, x_stride, P, BLOCK_P)
    dout = load_tile(dy_ptr + token * H * P + h * P, i, count, H * P, P, BLOCK_P)
    b_tile = load_tile(key_ptr + token * key_stride + h // R * N, i, count, key_stride, N, BLOCK_N)
    c_tile = load_tile(query_ptr + token * query_stride + h // R * N, i, count, query_stride, N, BLOCK_N)
    state = load_state(states_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N)
    dstate = load_state(dstates_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N)
    total, step = tl.load(gate + 2 * L - 1), tl.load(gate + i)
    carried = total * trace(dot(state, tl.trans(dstate)), tl.arange(0, BLOCK_P))

    dmixed = dot(dout, tl.trans(value))
    tl.store(dD_ptr + (b * C + c) * H + h, trace(dmixed, i))
    mixed = dot(c_tile, tl.trans(b_tile)) * decay_inside(
        decays_ptr + chunk * L, spans_ptr + (b * C + c) * 2 * L, i
    )
    pair = dmixed * mixed
    dstep = tl.sum(pair, 0)
    pair = (pair * step[None, :]).to(value.dtype)
    mixed *= step[None, :]
    mixed += tl.where(i[:, None] == i[None, :], tl.load(D_ptr + h).to(tl.float32), 0.0)
    mixed = tl.trans(mixed.to(value.dtype))

    out = dot(b_tile, tl.trans(dstate)) * tl.load(gate + 2 * L + i)[:, None]
    left = tl.sum(out * value, 1)
    out = dot(mixed, dout, out * step[:, None])
    store_tile(dx_ptr + token * H * P + h * P, i, count, H * P, P, BLOCK_P, out)
    entered = tl.load(gate + L + i) * tl.sum(dot(c_tile, tl.trans(state)) * dout, 1)
    # A log decay at t applies between s < t (or the entering state) and each i >= t, and to the chunk's end.
    from_t = (i[None, :] >= i[:, None]).to(value.dtype)
    dlog = dot(from_t, pair) + (step * left)[None, :]
    dlog = tl.sum(tl.where(i[None, :] < i[:, None], dlog, entered[None, :]), 1) + carried
    tl.store(dA_ptr + (b * C + c) * H + h, tl.sum(dlog * step))
    dstep = dlog * tl.load(A_ptr + h).to(tl.float32) + (dstep + left)
    tl.store(ddt_ptr + (token + i) * H + h, dstep, mask=i < count)


@triton.jit
def group_gradient_kernel(
    x_ptr, key_ptr, query_ptr, dy_ptr, decays_ptr, gates_ptr, spans_ptr, states_ptr, dstates_ptr, dkey_ptr,
    dquery_ptr, B, T, C, CHUNK,
    x_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    PART: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """PART heads of one group on one chunk, BLOCK_N columns of the gradients: dkey and dquery (parts,B,T,G,N) are
    partial sums."""
    c, b, i = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.arange(0, L)
    parts: tl.constexpr = (R + PART - 1) // PART
    first = tl.program_id(1) % tl.cdiv(N, BLOCK_N) * BLOCK_N
    part, group = (
        tl.program_id(1) // tl.cdiv(N, BLOCK_N) % parts,
        tl.program_id(1) // tl.cdiv(N, BLOCK_N) // parts,
    )
    count, token = tl.minimum(CHUNK, T - c * CHUNK), b * T + c * CHUNK
    spans_ptr += (b * C + c) * 2 * L
    dscores = tl.zeros((L, L), tl.float32)
    db, dc = tl.zeros((L, BLOCK_N), tl.float32), tl.zeros((L, BLOCK_N), tl.float32)
    for h in range(group * R + part * PART, group * R + tl.minimum(part * PART + PART, R)):
        chunk = (b * H + h) * C + c
        gate = gates_ptr + chunk * 3 * L
        value = load_tile(x_ptr + token * x_stride + h * P, i, count, x_stride, P, BLOCK_P)
        dout = load_tile(dy_ptr + token * H * P + h * P, i, count, H * P, P, BLOCK_P)
        step = tl.load(gate + i)
        dscores += (
            dot(dout, tl.trans(value)) * decay_inside(decays_ptr + chunk * L, spans_ptr, i) * step[None, :]
        )
        sent = (value * (step * tl.load(gate + 2 * L + i))[:, None]).to(value.dtype)
        db = dot(sent, load_state(dstates_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N, first), db)
        read = (dout * tl.load(gate + L + i)[:, None]).to(value.dtype)
        dc = dot(read, load_state(states_ptr + chunk * P * N, P, N, BLOCK_P, BLOCK_N, first), dc)

    b_tile = load_tile(key_ptr + token * key_stride + group * N, i, count, key_stride, N, BLOCK_N, first)
    c_tile = load_tile(
        query_ptr + token * query_stride + group * N, i, count, query_stride, N, BLOCK_N, first
    )
    dscores = dscores.to(b_tile.dtype)
    db = dot(tl.trans(dscores), c_tile, db)
    dc = dot(dscores, b_tile, dc)
    row = ((part * B * T + token) * (H // R) + group) * N
    store_tile(dkey_ptr + row, i, count, H // R * N, N, BLOCK_N, db, first)
    store_tile(dquery_ptr + row, i, count, H // R * N, N, BLOCK_N, dc, first)
