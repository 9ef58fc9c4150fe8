"""attention for compute capability 9.0 (H100, H200) in Gluon: the three kernels of kernel.py with a producer warp.

Algorithms and arguments are as in kernel.py. What differs is how a program's 12 warps share the work: one copies
tiles to shared memory with the TMA, four compute the first 64 of the program's 128 rows and four the others, so that
the softmax of one half runs next to the matrix products of the other. Their threads have 240 registers each, the
producer's 24; the forward at P 64, with two programs per SM, has 104 and 24. Shared memory holds two kinds of tiles:

    resident    what a program keeps: Q (forward), Q and dO (dQ), K and V (dK, dV). Its results overwrite it at the end.
    ring        STAGES pairs of what it loops over: K and V (forward, dQ), Q and dO (dK, dV). Pair s is in ring[s], with
                barriers ready[s] when the TMA has filled it and free[s] when both halves have read it, and in
                ring[STAGES + s], with other_ready[s] and other_free[s]. Barriers of both in one array would make the
                compiler put a barrier of the four warps between the two products.

In the forward pass the product of P and V also overlaps the softmax of the next block. No atomics: bitwise
deterministic. P is 64 or 128.

Sources: FlashAttention-3 (Shah et al. 2024), Triton's Gluon tutorials.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels._triton.block_spans import loop_block
from kernels._triton.constants import LN2, LOWEST
from kernels._triton.softcap import apply_softcap, softcap_bwd

# Launch options of one program per SM, and of two.
WHOLE = {"STAGES": 2, "REGISTERS": 240, "num_warps": 4}
SHARED = {"STAGES": 4, "REGISTERS": 104, "num_warps": 4, "maxnreg": 80}
# By head dim: M query rows and N keys of a block, and the launch options of each kernel.
BACKWARD = {"dkdv": (64, 128, WHOLE), "dq": (128, 64, WHOLE)}
TILES = {
    64: BACKWARD | {"forward": (128, 64, SHARED)},
    128: BACKWARD | {"forward": (128, 128, WHOLE)},
}


@gluon.jit
def _load(
    first_desc, second_desc, ring_desc, other_desc, spans,
    resident, ring, loaded, ready, free, other_ready, other_free,
    token, row, column, ring_column, PAIR: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the resident tiles, second_desc's only if PAIR, then each pair of the ring, HEADS pairs a block."""
    HALF: gl.constexpr = first_desc.block_shape[0]
    STEP: gl.constexpr = ring_desc.block_shape[0]
    P: gl.constexpr = ring_desc.block_shape[1]
    begin, before, full, masked = gl.load(spans), gl.load(spans + 1), gl.load(spans + 2), gl.load(spans + 3)
    BYTES: gl.constexpr = first_desc.nbytes_per_cta * (4 if PAIR else 2)
    mbarrier.expect(loaded, BYTES)
    for half in gl.static_range(2):
        tma.async_load(first_desc, [token + row + half * HALF, column], loaded, resident.index(half))
        if PAIR:
            tma.async_load(second_desc, [token + row + half * HALF, column], loaded, resident.index(2 + half))
    for FULL in gl.static_range(2):
        count = HEADS * (full if FULL else masked)
        done = HEADS * masked if FULL else 0
        for step in range(count):
            slot = (done + step) % STAGES
            unread = (((done + step) // STAGES) & 1) ^ 1
            at = token + loop_block(step // HEADS, begin, before, full, FULL) * STEP
            head_column = ring_column + step % HEADS * P
            mbarrier.wait(free.index(slot), unread)
            mbarrier.expect(ready.index(slot), ring_desc.nbytes_per_cta)
            tma.async_load(ring_desc, [at, head_column], ready.index(slot), ring.index(slot))
            mbarrier.wait(other_free.index(slot), unread)
            mbarrier.expect(other_ready.index(slot), other_desc.nbytes_per_cta)
            tma.async_load(other_desc, [at, head_column], other_ready.index(slot), ring.index(STAGES + slot))


@gluon.jit
def _hide(x, query, key, query_ids, key_ids, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Set x to -inf where the query may not attend to the key, as kernels._triton.tiles.apply_mask does."""
    visible = query_ids == key_ids
    if CAUSAL:
        visible = visible & (key <= query)
    if WINDOW > 0:
        visible = visible & (query - key < WINDOW)
    return gl.where(visible, x, float("-inf"))


@gluon.jit
def _visible(
    x, rows, row_ids, ids, start, N: gl.constexpr, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """_hide for rows of queries and the N keys from `start` on."""
    keys = start + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    key_ids = gl.load(ids + keys)
    return _hide(x, rows[:, None], keys[None, :], row_ids[:, None], key_ids[None, :], CAUSAL, WINDOW)


@gluon.jit
def _logits(x, qk_scale, a, b, SOFTCAP: gl.constexpr):
    """Return the base-2 logits of kernels/_triton/softcap.py; without a softcap their offset b is zero."""
    if SOFTCAP == "none":
        return x * (qk_scale * a)
    return apply_softcap(x * qk_scale, SOFTCAP) * a + b


@gluon.jit
def _forward_half(
    half: gl.constexpr, out_desc, ids, spans, lse,
    resident, ring, loaded, ready, free, other_ready, other_free,
    token, row, column, qk_scale, a, b, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, ONLINE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """out and lse of 64 rows. Each block's Q K^T is issued together with the P V of the block before it."""
    HALF: gl.constexpr = resident.shape[1]
    P: gl.constexpr = resident.shape[2]
    N: gl.constexpr = ring.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    begin, before, full, masked = gl.load(spans), gl.load(spans + 1), gl.load(spans + 2), gl.load(spans + 3)
    query = resident.index(half)
    rows = row + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOGITS))
    row_ids = gl.load(ids + rows)
    acc = gl.zeros([HALF, P], gl.float32, RESULT)
    zero = gl.zeros([HALF, N], gl.float32, LOGITS)
    mbarrier.wait(loaded, 0)
    mbarrier.wait(ready.index(0), 0)
    x = warpgroup_mma(query, ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, [x])
    mbarrier.arrive(free.index(0))
    x = _logits(x, qk_scale, a, b, SOFTCAP)
    start = N * gl.where(masked > 0, loop_block(0, begin, before, full, False), begin + before)
    x = _visible(x, rows, row_ids, ids, start, N, LOGITS, CAUSAL, WINDOW)
    largest = gl.maximum(gl.max(x, 1), LOWEST)
    weights = gl.exp2(x - largest[:, None])
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(ring.dtype), FACTOR)
    for FULL in gl.static_range(2):
        if FULL and not ONLINE:
            largest = gl.where(largest > -1e29, largest, 0.0)
        done = masked if FULL else 0
        for i in range(gl.maximum(done, 1), masked + full if FULL else masked):
            slot, last = i % STAGES, (i - 1) % STAGES
            mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
            x = warpgroup_mma(query, ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(other_ready.index(last), ((i - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, ring.index(STAGES + last), acc, is_async=True)
            x = warpgroup_mma_wait(1, [x])
            mbarrier.arrive(free.index(slot))
            x = _logits(x, qk_scale, a, b, SOFTCAP)
            if not FULL:
                start = loop_block(i, begin, before, full, False) * N
                x = _visible(x, rows, row_ids, ids, start, N, LOGITS, CAUSAL, WINDOW)
            if ONLINE or not FULL:
                lower, largest = largest, gl.maximum(largest, gl.max(x, 1))
                shrink = gl.exp2(lower - largest)
                total *= shrink
            weights = gl.exp2(x - largest[:, None])
            total += gl.sum(weights, 1)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(other_free.index(last))
            p = gl.convert_layout(weights.to(ring.dtype), FACTOR)
            if ONLINE or not FULL:
                acc *= gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    last = masked + full - 1
    mbarrier.wait(other_ready.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(p, ring.index(STAGES + last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    gl.store(lse + rows, (largest + gl.log2(total)) * LN2)
    query.store((acc / gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]).to(ring.dtype))
    fence_async_shared()
    tma.async_store(out_desc, [token + row + half * HALF, column], query)
    tma.store_wait(0)


@gluon.jit
def _dkdv_half(
    half: gl.constexpr, dk_desc, dv_desc, ids, spans, delta_ptr, shift_ptr,
    resident, ring, loaded, ready, free, other_ready, other_free,
    token, row, column, vectors, T, qk_scale, a, grad_scale, R: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, with logits transposed as in kernel.py. vectors: where the first head's begin."""
    HALF: gl.constexpr = resident.shape[1]
    P: gl.constexpr = resident.shape[2]
    M: gl.constexpr = ring.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    begin, before, full, masked = gl.load(spans), gl.load(spans + 1), gl.load(spans + 2), gl.load(spans + 3)
    key, value = resident.index(half), resident.index(2 + half)
    dkey, dvalue = gl.zeros([HALF, P], gl.float32, RESULT), gl.zeros([HALF, P], gl.float32, RESULT)
    columns = gl.arange(0, M, layout=gl.SliceLayout(0, LOGITS))
    zero = gl.zeros([HALF, M], gl.float32, LOGITS)
    mbarrier.wait(loaded, 0)
    for FULL in gl.static_range(2):
        done = R * masked if FULL else 0
        for step in range(R * (full if FULL else masked)):  # blocks and heads in one loop: one pipeline
            slot, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
            query, do = ring.index(slot), ring.index(STAGES + slot)
            start = loop_block(step // R, begin, before, full, FULL) * M
            at = vectors + step % R * T + start
            mbarrier.wait(ready.index(slot), phase)
            x = warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(other_ready.index(slot), phase)
            dp = warpgroup_mma(value, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            shift = gl.load(shift_ptr + at + columns)
            x = warpgroup_mma_wait(1, [x])
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + shift[None, :]
            if not FULL:
                keys = row + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOGITS))
                queries = start + columns
                key_ids, query_ids = gl.load(ids + keys), gl.load(ids + queries)
                x = _hide(
                    x, queries[None, :], keys[:, None], query_ids[None, :], key_ids[:, None], CAUSAL, WINDOW
                )
            p = gl.exp2(x)
            dsoftcap = softcap_bwd(p, u, SOFTCAP)
            p = gl.convert_layout(p.to(ring.dtype), FACTOR)
            dvalue = warpgroup_mma(p, do, dvalue, is_async=True)
            delta = gl.load(delta_ptr + at + columns)
            dp = warpgroup_mma_wait(1, [dp])
            ds = gl.convert_layout((dsoftcap * (dp - delta[None, :])).to(ring.dtype), FACTOR)
            dkey = warpgroup_mma(ds, query, dkey, is_async=True)
            dvalue, p = warpgroup_mma_wait(1, [dvalue, p])
            mbarrier.arrive(other_free.index(slot))
            dkey, ds = warpgroup_mma_wait(0, [dkey, ds])
            mbarrier.arrive(free.index(slot))
    key.store((dkey * grad_scale).to(ring.dtype))
    value.store(dvalue.to(ring.dtype))
    fence_async_shared()
    tma.async_store(dk_desc, [token + row + half * HALF, column], key)
    tma.async_store(dv_desc, [token + row + half * HALF, column], value)
    tma.store_wait(0)


@gluon.jit
def _dq_half(
    half: gl.constexpr, dq_desc, ids, spans, delta_ptr, shift_ptr,
    resident, ring, loaded, ready, free, other_ready, other_free,
    token, row, column, qk_scale, a, grad_scale, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """dQ of 64 rows. With a softcap, the next block's Q K^T is issued before dQ of this one is waited for."""
    HALF: gl.constexpr = resident.shape[1]
    P: gl.constexpr = resident.shape[2]
    N: gl.constexpr = ring.shape[1]
    AHEAD: gl.constexpr = SOFTCAP != "none"
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    begin, before, full, masked = gl.load(spans), gl.load(spans + 1), gl.load(spans + 2), gl.load(spans + 3)
    query, do = resident.index(half), resident.index(2 + half)
    rows = row + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOGITS))
    row_ids, shift, delta = gl.load(ids + rows), gl.load(shift_ptr + rows), gl.load(delta_ptr + rows)
    dquery = gl.zeros([HALF, P], gl.float32, RESULT)
    zero = gl.zeros([HALF, N], gl.float32, LOGITS)
    mbarrier.wait(loaded, 0)
    if AHEAD:
        mbarrier.wait(ready.index(0), 0)
        x = warpgroup_mma(query, ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, [x])
    for FULL in gl.static_range(2):
        for i in range(masked if FULL else 0, masked + full if FULL else masked):
            slot, phase = i % STAGES, (i // STAGES) & 1
            if not AHEAD:
                mbarrier.wait(ready.index(slot), phase)
                x = warpgroup_mma(query, ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(other_ready.index(slot), phase)
            dp = warpgroup_mma(
                do, ring.index(STAGES + slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            if not AHEAD:
                x = warpgroup_mma_wait(1, [x])
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + shift[:, None]
            if not FULL:
                start = loop_block(i, begin, before, full, False) * N
                x = _visible(x, rows, row_ids, ids, start, N, LOGITS, CAUSAL, WINDOW)
            dsoftcap = softcap_bwd(gl.exp2(x), u, SOFTCAP)
            dp = warpgroup_mma_wait(0, [dp])
            mbarrier.arrive(other_free.index(slot))
            ds = gl.convert_layout((dsoftcap * (dp - delta[:, None])).to(ring.dtype), FACTOR)
            dquery = warpgroup_mma(ds, ring.index(slot), dquery, is_async=True)
            if AHEAD:
                following = gl.minimum(i + 1, masked + full - 1)
                mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1)
                key = ring.index(following % STAGES).permute((1, 0))
                x = warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
                dquery, ds, x = warpgroup_mma_wait(0, [dquery, ds, x])
            else:
                dquery, ds = warpgroup_mma_wait(0, [dquery, ds])
            mbarrier.arrive(free.index(slot))
    query.store((dquery * grad_scale).to(ring.dtype))
    fence_async_shared()
    tma.async_store(dq_desc, [token + row + half * HALF, column], query)
    tma.store_wait(0)


@gluon.jit
def _memory(first_desc, ring_desc, TILES: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory, and barriers with their counts of arrivals."""
    HALF: gl.constexpr = first_desc.block_shape[0]
    STEP: gl.constexpr = ring_desc.block_shape[0]
    P: gl.constexpr = ring_desc.block_shape[1]
    resident = gl.allocate_shared_memory(first_desc.dtype, [TILES, HALF, P], first_desc.layout)
    ring = gl.allocate_shared_memory(ring_desc.dtype, [2 * STAGES, STEP, P], ring_desc.layout)
    loaded = mbarrier.allocate_mbarrier()
    ready, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    other_ready, other_free = (
        mbarrier.allocate_mbarrier(batch=STAGES),
        mbarrier.allocate_mbarrier(batch=STAGES),
    )
    mbarrier.init(loaded, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
        mbarrier.init(other_ready.index(slot), count=1)
        mbarrier.init(other_free.index(slot), count=2)
    fence_async_shared()
    return resident, ring, loaded, ready, free, other_ready, other_free


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, ids_ptr, spans_ptr, lse_ptr, T, qk_scale, a, b,
    Hq: gl.constexpr, Hkv: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    SOFTCAP: gl.constexpr, ONLINE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """out and lse of 128 rows of one head. The last rows, which loop over the most keys, are started first."""
    batch, head = gl.program_id(0) // Hq, gl.program_id(0) % Hq
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    token, row = batch * T, block * (2 * q_desc.block_shape[0])
    ids, spans = ids_ptr + token, spans_ptr + (batch * gl.num_programs(1) + block) * 4
    lse = lse_ptr + gl.program_id(0).to(gl.int64) * T
    column, kv_column = head * P, head // (Hq // Hkv) * P
    resident, ring, loaded, ready, free, other_ready, other_free = _memory(q_desc, k_desc, 2, STAGES)
    gl.warp_specialize([
        (_forward_half, (
            0, out_desc, ids, spans, lse,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, qk_scale, a, b, STAGES, SOFTCAP, ONLINE, CAUSAL, WINDOW,
        )),
        (_forward_half, (
            1, out_desc, ids, spans, lse,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, qk_scale, a, b, STAGES, SOFTCAP, ONLINE, CAUSAL, WINDOW,
        )),
        (_load, (
            q_desc, q_desc, k_desc, v_desc, spans,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, kv_column, False, 1, STAGES,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, ids_ptr, spans_ptr, delta_ptr, shift_ptr,
    T, qk_scale, a, grad_scale,
    Hq: gl.constexpr, Hkv: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    SOFTCAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys of one key/value head."""
    R: gl.constexpr = Hq // Hkv
    batch, group, block = gl.program_id(0) // Hkv, gl.program_id(0) % Hkv, gl.program_id(1)
    token, row = batch * T, block * (2 * k_desc.block_shape[0])
    ids, spans = ids_ptr + token, spans_ptr + (batch * gl.num_programs(1) + block) * 4
    column, q_column = group * P, group * R * P
    vectors = (batch * Hq + group * R).to(gl.int64) * T
    resident, ring, loaded, ready, free, other_ready, other_free = _memory(k_desc, q_desc, 4, STAGES)
    gl.warp_specialize([
        (_dkdv_half, (
            0, dk_desc, dv_desc, ids, spans, delta_ptr, shift_ptr,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, vectors, T, qk_scale, a, grad_scale, R, STAGES, SOFTCAP, CAUSAL, WINDOW,
        )),
        (_dkdv_half, (
            1, dk_desc, dv_desc, ids, spans, delta_ptr, shift_ptr,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, vectors, T, qk_scale, a, grad_scale, R, STAGES, SOFTCAP, CAUSAL, WINDOW,
        )),
        (_load, (
            k_desc, v_desc, q_desc, do_desc, spans,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, q_column, True, R, STAGES,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, ids_ptr, spans_ptr, delta_ptr, shift_ptr,
    T, qk_scale, a, grad_scale,
    Hq: gl.constexpr, Hkv: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    SOFTCAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """dQ of 128 rows of one head, with the key-block loop of the forward."""
    batch, head = gl.program_id(0) // Hq, gl.program_id(0) % Hq
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    token, row = batch * T, block * (2 * q_desc.block_shape[0])
    ids, spans = ids_ptr + token, spans_ptr + (batch * gl.num_programs(1) + block) * 4
    vectors = gl.program_id(0).to(gl.int64) * T
    delta, shift = delta_ptr + vectors, shift_ptr + vectors
    column, kv_column = head * P, head // (Hq // Hkv) * P
    resident, ring, loaded, ready, free, other_ready, other_free = _memory(q_desc, k_desc, 4, STAGES)
    gl.warp_specialize([
        (_dq_half, (
            0, dq_desc, ids, spans, delta, shift,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, qk_scale, a, grad_scale, STAGES, SOFTCAP, CAUSAL, WINDOW,
        )),
        (_dq_half, (
            1, dq_desc, ids, spans, delta, shift,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, qk_scale, a, grad_scale, STAGES, SOFTCAP, CAUSAL, WINDOW,
        )),
        (_load, (
            q_desc, do_desc, k_desc, v_desc, spans,
            resident, ring, loaded, ready, free, other_ready, other_free,
            token, row, column, kv_column, True, 1, STAGES,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def descriptors(*tiled: tuple[Tensor, int]) -> list[TensorDescriptor]:
    """Describe each t (B,T,H,P) to the TMA as a (BT,HP) matrix that is read and written in tiles of (rows,P)."""
    found = []
    for t, rows in tiled:
        B, T, H, P = t.shape
        tile = [rows, P]
        found.append(TensorDescriptor(t, [B * T, H * P], [H * P, 1], tile, _layout(rows, P, t.dtype)))
    return found


@cache
def _layout(rows: int, P: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([rows, P], kind)
