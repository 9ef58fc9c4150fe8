"""attention in Triton: online softmax forward, backward recomputed from the logsumexp, blocks skipped by document.

    forward     one program per (query block, query head). Q, the output and the row sums stay in registers;
                K and V blocks are streamed. Writes out and lse.
    rows        delta = sum_p dout * out, and the logsumexp in base 2, once per query row.
    dK, dV      one program per (key block, key/value head): it loops over the query blocks of its R query heads,
                so that a group's sum stays in registers. No atomics: bitwise deterministic.
    dQ          one program per (query block, query head). Both recompute S and P: 7 matrix products instead of
                the minimum of 5 are the cost of a fixed summation order.

`_span_kernel` first finds which blocks a program loops over: one run of blocks that need no element mask
(one document, below the diagonal, inside the window) and the blocks on both sides of it that do. Documents need
not be sorted: a block is skipped only if the ranges of ids are disjoint; inside a block, ids are compared.

A logit is kept as its base-2 form u * a + b, where u is x = gain * q.k after the softcap c:

    CAP       u                                               ds/dx ~       a               b
    "none"    x                                               1             scale log2e     0
    "exact"   tanh(x), x = s/c                                1 - u^2       c log2e         0
    "fast"    1/(1 + 2^x) = (1 - tanh(s/c))/2                 u - u^2       -2 c log2e      c log2e

"fast" costs an exp2, a reciprocal root and 3 multiply-adds. It has an absolute error of 1e-7 c where "exact" has a
relative one: negligible for c <= 64 next to the rounding of P to bf16 or fp16, but too large for fp32. For c <= 32
the maximum of the masked blocks (with the diagonal) also serves for the full blocks: other logits are at most 2c
above it, and e^64 can be summed in fp32 and stored in bf16, though not in fp16.
Limited by the matrix products and by 3 special-function results per element (1 without softcap; 16 per cycle per
SM). Bytes: Q, out and dout once; K and V once per query block, Q and dout once per key block, mostly from L2.

B batch, T tokens, Hq query heads, Hkv key/value heads, R = Hq / Hkv, P head dim (WIDTH: padded to 16), M query
rows and N keys of a block. Sources: FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
LARGEST_FAST_CAP, LARGEST_FIXED_CAP = 64.0, 32.0


@triton.jit
def _load(x, start, stride, T, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load rows start.. of a (T,P) matrix as a (ROWS,WIDTH) tile, zero outside. EVEN: all rows are in range."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    # 64-bit offsets throughout, constant part last: the compiler then keeps fewer address registers.
    at = x + (start.to(tl.int64) * stride + column.to(tl.int64)) + row.to(tl.int64) * stride
    if EVEN and P == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(start + row < T) & (column < P), other=0.0)


@triton.jit
def _store(x, start, stride, T, P: tl.constexpr, tile):
    row = tl.arange(0, tile.shape[0])[:, None]
    column = tl.arange(0, tile.shape[1])[None, :]
    at = x + start.to(tl.int64) * stride + row * stride + column
    tl.store(at, tile.to(x.dtype.element_ty), mask=(start + row < T) & (column < P))


@triton.jit
def _vector(base, rows, T, EVEN: tl.constexpr):
    """base[rows], zero outside."""
    if EVEN:
        return tl.load(base + rows)
    return tl.load(base + rows, mask=rows < T, other=0)


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """u of the table in the module docstring."""
    if CAP == "none":
        return x
    if CAP == "fast":
        root = tl.rsqrt(1.0 + tl.exp2(x))
        return root * root  # a division takes 4 more instructions, to handle huge divisors
    # 1 - e cancels for small x: use an odd polynomial (least squares on [0, 0.625], relative error 4.5e-9).
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    c = -0.33333281 + y * (0.13331432 + y * (-0.053739157 + y * (0.020637861 - y * 0.0057040425)))
    return tl.where(tl.abs(x) < 0.625, x + x * y * c, tl.where(x < 0, -large, large))


@triton.jit
def _through_cap(grad, u, CAP: tl.constexpr):
    """grad times the derivative of the softcap, without the constant factor, which is in `gain_out`."""
    if CAP == "none":
        return grad
    return grad * ((u if CAP == "fast" else 1.0) - u * u)


@triton.jit
def _hide(
    x, rows, columns, row_ids, column_ids, T,
    TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Mask x (M,N), or (N,M) if TRANSPOSED: -inf where the query of a row may not attend to the key of a column."""
    across: tl.constexpr = 0 if TRANSPOSED else 1
    query, query_ids = tl.expand_dims(rows, across), tl.expand_dims(row_ids, across)
    key, key_ids = tl.expand_dims(columns, 1 - across), tl.expand_dims(column_ids, 1 - across)
    seen = query_ids == key_ids
    if not EVEN:
        seen = seen & (key < T)
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW > 0:
        seen = seen & (query - key < WINDOW)
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _span_kernel(
    ids, spans, T, OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
    OWN_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write spans (B, blocks, 4): the loop of a block of OWN keys (OWN_KEYS) or queries over blocks of OTHER.

    Each entry: first block, masked blocks before the full run, full blocks, masked blocks. A full block has
    every pair visible. Full blocks are used only if they form one run; out-of-order documents may leave gaps.
    """
    block, batch = tl.program_id(0), tl.program_id(1)
    ids += batch.to(tl.int64) * T
    own_first = block * OWN
    own_last = tl.minimum(own_first + OWN, T) - 1
    own_ids = tl.load(ids + tl.minimum(own_first + tl.arange(0, OWN), own_last))
    own_low, own_high = tl.min(own_ids, 0), tl.max(own_ids, 0)
    begin, end, full_begin, full_end, full_count = T, 0, T, 0, 0  # in blocks: there are at most T
    for chunk in range(tl.cdiv(T, OTHER * CHUNK)):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        first, last = other * OTHER, other * OTHER + OTHER - 1
        other_ids = tl.load(ids + tl.minimum(first[:, None] + tl.arange(0, OTHER)[None, :], T - 1))
        low, high = tl.min(other_ids, 1), tl.max(other_ids, 1)
        if OWN_KEYS:
            nearest, farthest = first - own_last, last - own_first
        else:
            nearest, farthest = own_first - last, own_last - first
        walk = (first < T) & (low <= own_high) & (high >= own_low)
        full = (last < T) & (low == own_high) & (high == own_low)
        if CAUSAL:
            walk, full = walk & (farthest >= 0), full & (nearest >= 0)
        if WINDOW > 0:
            walk, full = walk & (nearest < WINDOW), full & (farthest < WINDOW)
        begin = tl.minimum(begin, tl.min(tl.where(walk, other, T), 0))
        end = tl.maximum(end, tl.max(tl.where(walk, other + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(full, other, T), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(full, other + 1, 0), 0))
        full_count += tl.sum(full.to(tl.int32), 0)
    run = tl.where(full_count == full_end - full_begin, full_count, 0)
    span = spans + (batch * tl.num_programs(0) + block) * 4
    tl.store(span, begin)
    tl.store(span + 1, tl.where(run > 0, full_begin - begin, 0))
    tl.store(span + 2, run)
    tl.store(span + 3, tl.maximum(end - begin, 0) - run)


@triton.jit
def _walk_block(step, begin, before, full, FULL: tl.constexpr):
    """Index of the step-th block that needs no mask (FULL), or of the step-th that needs one."""
    if FULL:
        return begin + before + step
    return begin + step + tl.where(step < before, 0, full)


@triton.jit
def _forward_kernel(
    q, k, v, ids, spans, out, lse, T, gain, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, ONLINE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out and lse of M rows of one head. The last rows, which loop over the most keys, are started first."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head, kv_head = (first_token * Hq + head) * P, (first_token * Hkv + head // (Hq // Hkv)) * P
    rows = block * M + tl.arange(0, M)
    row_ids = _vector(ids + first_token, rows, T, EVEN)
    query = _load(q + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    largest = tl.full((M,), -1e30, tl.float32)  # finite: a row with no visible key yet must not give nan
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WIDTH), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        if FULL and not ONLINE:
            # The maximum is now fixed; if no block was masked, any value of the logits' magnitude works.
            largest = tl.where(largest > -1e29, largest, 0.0)
        for step in range(full if FULL else masked):
            start = _walk_block(step, begin, before, full, FULL) * N
            key = _load(k + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            value = _load(v + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            u = _capped(tl.dot(query, tl.trans(key), input_precision="ieee") * gain, CAP)
            if FULL and not ONLINE:
                p = tl.exp2(u * a + (b - largest)[:, None])
            else:
                x = u * a + b
                if not FULL:
                    columns = start + tl.arange(0, N)
                    column_ids = _vector(ids + first_token, columns, T, EVEN)
                    x = _hide(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, WINDOW, EVEN)
                lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
                shrink = tl.exp2(lower - largest)
                total, acc = total * shrink, acc * shrink[:, None]
                p = tl.exp2(x - largest[:, None])
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)  # rows past the end
    _store(out + q_head, block * M, Hq * P, T, P, acc / total[:, None])
    at = lse + (batch.to(tl.int64) * Hq + head) * T + rows
    tl.store(at, (largest + tl.log2(total)) * 0.6931471805599453, mask=rows < T)


@triton.jit
def _rows_kernel(
    out, dout, lse, delta, shift, T, b,
    Hq: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum_p dout * out and shift = b - lse log2e, (B,Hq,T) fp32: p is then exp2(u * a + shift)."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    start = tl.program_id(1) * M
    base = (batch.to(tl.int64) * T * Hq + head) * P
    o = _load(out + base, start, Hq * P, T, P, M, WIDTH, False).to(tl.float32)
    do = _load(dout + base, start, Hq * P, T, P, M, WIDTH, False).to(tl.float32)
    rows = start + tl.arange(0, M)
    at = (batch.to(tl.int64) * Hq + head) * T + rows
    tl.store(delta + at, tl.sum(o * do, 1), mask=rows < T)
    log = tl.load(lse + at, mask=rows < T, other=0.0)
    tl.store(shift + at, b - log * 1.4426950408889634, mask=rows < T)


@triton.jit
def _dkdv_kernel(
    q, k, v, ids, spans, dout, delta, shift, dk, dv, T, gain, a, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one key/value head. Logits are kept transposed, (N,M): P and dS then leave one
    product in the layout of the next one. Registers are scarce: each vector is loaded where it is used."""
    R: tl.constexpr = Hq // Hkv
    batch, group, block = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv, tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    kv_head = (first_token * Hkv + group) * P
    columns = block * N + tl.arange(0, N)
    column_ids = _vector(ids + first_token, columns, T, EVEN)
    key = _load(k + kv_head, block * N, Hkv * P, T, P, N, WIDTH, EVEN)
    value = _load(v + kv_head, block * N, Hkv * P, T, P, N, WIDTH, EVEN)
    dkey, dvalue = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(R * (full if FULL else masked)):  # blocks and heads in one loop: one pipeline
            head = group * R + step % R
            start = _walk_block(step // R, begin, before, full, FULL) * M
            rows = start + tl.arange(0, M)
            q_head, q_row = (first_token * Hq + head) * P, (batch.to(tl.int64) * Hq + head) * T
            query = _load(q + q_head, start, Hq * P, T, P, M, WIDTH, FULL or EVEN)
            do = _load(dout + q_head, start, Hq * P, T, P, M, WIDTH, FULL or EVEN)
            x = tl.dot(key, tl.trans(query), input_precision="ieee")
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")  # overlaps the exponentials
            u = _capped(x * gain, CAP)
            x = u * a + _vector(shift + q_row, rows, T, FULL or EVEN)[None, :]
            if not FULL:
                row_ids = _vector(ids + first_token, rows, T, EVEN)
                x = _hide(x, rows, columns, row_ids, column_ids, T, True, CAUSAL, WINDOW, EVEN)
            p = tl.exp2(x)
            slope = _through_cap(p, u, CAP)
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            ds = slope * (dp - _vector(delta + q_row, rows, T, FULL or EVEN)[None, :])
            dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    _store(dk + kv_head, block * N, Hkv * P, T, P, dkey * gain_out)
    _store(dv + kv_head, block * N, Hkv * P, T, P, dvalue)


@triton.jit
def _dq_kernel(
    q, k, v, ids, spans, dout, delta, shift, dq, T, gain, a, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dQ of M rows of one head, with the key-block loop of the forward."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head, kv_head = (first_token * Hq + head) * P, (first_token * Hkv + head // (Hq // Hkv)) * P
    q_row = (batch.to(tl.int64) * Hq + head) * T
    rows = block * M + tl.arange(0, M)
    row_ids = _vector(ids + first_token, rows, T, EVEN)
    row_shift, row_delta = _vector(shift + q_row, rows, T, EVEN), _vector(delta + q_row, rows, T, EVEN)
    query = _load(q + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    do = _load(dout + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    dquery = tl.zeros((M, WIDTH), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = _walk_block(step, begin, before, full, FULL) * N
            key = _load(k + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            value = _load(v + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            x = tl.dot(query, tl.trans(key), input_precision="ieee")
            dp = tl.dot(do, tl.trans(value), input_precision="ieee")
            u = _capped(x * gain, CAP)
            x = u * a + row_shift[:, None]
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = _vector(ids + first_token, columns, T, EVEN)
                x = _hide(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, WINDOW, EVEN)
            ds = _through_cap(tl.exp2(x), u, CAP) * (dp - row_delta[:, None])
            dquery = tl.dot(ds.to(key.dtype), key, dquery, input_precision="ieee")
    _store(dq + q_head, block * M, Hq * P, T, P, dquery * gain_out)


def _tiles(P: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages) of each kernel. fp32 runs on the FMA units and exhausts registers much sooner."""
    if dtype == torch.float32:
        return dict.fromkeys(("forward", "dkdv", "dq"), (32, 32, 4, 2) if P <= 64 else (16, 16, 4, 1))
    if P <= 64:
        return {"forward": (128, 64, 8, 2), "dkdv": (64, 64, 4, 2), "dq": (64, 64, 4, 2)}
    return {"forward": (128, 128, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)}


def _logit(scale: float, softcap: float, dtype: torch.dtype) -> tuple[str, float, float, float, float]:
    """CAP, gain, a, b of the module's table, and the factor that scales the backward sums to gradients."""
    if softcap == 0:
        return "none", 1.0, scale * LOG2E, 0.0, scale
    a = softcap * LOG2E
    if dtype == torch.float32 or softcap > LARGEST_FAST_CAP:
        return "exact", scale / softcap, a, 0.0, scale
    return "fast", 2 * LOG2E * scale / softcap, -2 * a, a, 4 * scale


def _width(P: int) -> int:
    """Tile width for the head dim: a matrix product is at least 16 wide."""
    if P & (P - 1) or not 1 <= P <= 128:
        raise ValueError(f"attention: on CUDA the head dim must be a power of two up to 128, not {P}")
    return max(P, 16)


def _spans(doc_ids: Tensor, own: int, other: int, own_keys: bool, window: int, causal: bool) -> Tensor:
    """(B, blocks, 4) int32, see `_span_kernel`."""
    B, T = doc_ids.shape
    spans = doc_ids.new_empty((B, triton.cdiv(T, own), 4))
    _span_kernel[spans.shape[1], B](
        doc_ids, spans, T, OWN=own, OTHER=other, CHUNK=4096 // other,
        OWN_KEYS=own_keys, CAUSAL=causal, WINDOW=window, num_warps=8,
    )  # fmt: skip
    return spans


def attention_fwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float, softcap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """q (B,T,Hq,P), k and v (B,T,Hkv,P) fp32, fp16 or bf16, doc_ids (B,T) int32 -> out (B,T,Hq,P) in q.dtype,
    lse (B,Hq,T) fp32. Non-contiguous inputs are copied. Raises ValueError unless P is a power of two <= 128."""
    B, T, Hq, P = q.shape
    width = _width(P)
    q, k, v, doc_ids = (t.contiguous() for t in (q, k, v, doc_ids))
    M, N, warps, stages = _tiles(P, q.dtype)["forward"]
    CAP, gain, a, b, _ = _logit(scale, softcap, q.dtype)
    spans = _spans(doc_ids, M, N, False, window, causal)
    out, lse = q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.float32)
    _forward_kernel[B * Hq, spans.shape[1]](
        q, k, v, doc_ids, spans, out, lse, T, gain, a, b, Hq=Hq, Hkv=k.shape[2], P=P, WIDTH=width, M=M, N=N,
        CAP=CAP, ONLINE=softcap == 0 or softcap > LARGEST_FIXED_CAP or q.dtype == torch.float16,
        CAUSAL=causal, WINDOW=window, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def attention_bwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in their shapes and dtype; bitwise deterministic. Arguments and errors as in the forward."""
    B, T, Hq, P = q.shape
    Hkv, width = k.shape[2], _width(P)
    q, k, v, doc_ids, out, lse, dout = (t.contiguous() for t in (q, k, v, doc_ids, out, lse, dout))
    tiles, (CAP, gain, a, b, gain_out) = _tiles(P, q.dtype), _logit(scale, softcap, q.dtype)
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    rows_grid = (B * Hq, triton.cdiv(T, 64))
    _rows_kernel[rows_grid](out, dout, lse, delta, shift, T, b, Hq=Hq, P=P, WIDTH=width, M=64, num_warps=4)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    options = {"Hq": Hq, "Hkv": Hkv, "P": P, "WIDTH": width, "CAP": CAP, "CAUSAL": causal, "WINDOW": window}
    M, N, warps, stages = tiles["dkdv"]
    spans = _spans(doc_ids, N, M, True, window, causal)
    _dkdv_kernel[B * Hkv, spans.shape[1]](
        q, k, v, doc_ids, spans, dout, delta, shift, dk, dv, T, gain, a, gain_out,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dq"]
    spans = _spans(doc_ids, M, N, False, window, causal)
    _dq_kernel[B * Hq, spans.shape[1]](
        q, k, v, doc_ids, spans, dout, delta, shift, dq, T, gain, a, gain_out,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
