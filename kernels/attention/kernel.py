"""attention in Triton: online softmax forward, backward rebuilt from the logsumexp, blocks skipped by document.

    forward     one program per (query block, query head). Q, the output and the row sums stay in registers;
                K and V blocks stream by. What is written: out and lse.
    rows        delta = sum_p dout * out, and the logsumexp in base 2, once per query row.
    dK, dV      one program per (key block, key/value head): it walks the query blocks of its R query heads one
                after the other, so that a group's sum is a register sum: no atomics, bit-repeatable.
    dQ          one program per (query block, query head). Both rebuild S and P, which is 7 matrix products
                against the least possible 5: what it costs to add up dQ in a fixed order without atomics.

Which blocks a program walks is found beforehand by `_span_kernel`, four integers a block: [first, full) and
[full end, end) need the element mask, the run between them needs none (one document, below the diagonal, inside
the window), blocks outside cannot be seen. Documents need not be sorted: a block is passed over only where the
ranges of ids do not meet, and the mask inside a block is equality.

A logit is kept as base-2 u * a + b, where u is what the softcap leaves of x = q.k * gain:

    "none"      u = x                                                          a = scale log2e     b = 0
    "exact"     u = tanh(x), x = s/c                       ds/dx = 1 - u^2     a = c log2e         b = 0
    "fast"      u = 1/(1 + 2^x) = (1 - tanh(s/c)) / 2      ds/dx ~ u - u^2     a = -2c log2e       b = c log2e

"fast" is one exp2 and one reciprocal, then a fused multiply-add into the exponent. It is off by 1e-7 c absolutely
where "exact" is off relatively, far below the rounding of P to bf16 or fp16; fp32 inputs take "exact". A softcap
also bounds the logits, so that for c <= 64 (e^64 sums in fp32, and in bf16) no running maximum is needed.

Bytes against the floor: forward reads Q once and K, V once per query block (from L2), so it is bound by the
tensor cores and by the 3 special-function results an element (exp2, exp2, reciprocal; 1 without softcap).

B batch, T tokens, Hq query heads, Hkv key/value heads, R = Hq / Hkv, P head dim, M query rows, N keys of a block.
Sources: FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
LARGEST_UNSHIFTED_CAP = 64.0


@triton.jit
def _load(base, start, stride, T, P: tl.constexpr, SHAPE: tl.constexpr, CHECKED: tl.constexpr):
    """Rows start.. of a (T,P) matrix with a row stride, as a (rows, BLOCK_P) tile; zeros outside."""
    row = tl.arange(0, SHAPE[0])[:, None]
    column = tl.arange(0, SHAPE[1])[None, :]
    at = base + (start.to(tl.int64) * stride + column.to(tl.int64)) + row.to(tl.int64) * stride
    if CHECKED:
        return tl.load(at, mask=(start + row < T) & (column < P), other=0.0)
    if SHAPE[1] > P:
        return tl.load(at, mask=(column < P) & (row >= 0), other=0.0)
    return tl.load(at)


@triton.jit
def _store(base, start, stride, T, P: tl.constexpr, tile):
    row = tl.arange(0, tile.shape[0])[:, None]
    column = tl.arange(0, tile.shape[1])[None, :]
    at = base + (start.to(tl.int64) * stride + column.to(tl.int64)) + row.to(tl.int64) * stride
    tl.store(at, tile.to(base.dtype.element_ty), mask=(start + row < T) & (column < P))


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """u of the module's table."""
    if CAP == "none":
        return x
    if CAP == "fast":
        root = tl.rsqrt(1.0 + tl.exp2(x))  # its square: a division is 4 instructions more, for huge divisors
        return root * root
    # 1 - e cancels for small x: there an odd polynomial, least squares on [0, 0.625], off by 4.5e-9 relatively.
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    c = -0.33333281 + y * (0.13331432 + y * (-0.053739157 + y * (0.020637861 - y * 0.0057040425)))
    return tl.where(tl.abs(x) < 0.625, x + x * y * c, tl.where(x < 0, -large, large))


@triton.jit
def _through_cap(grad, u, CAP: tl.constexpr):
    """grad times the derivative of the softcap, up to the constant that the host puts into `gain_out`."""
    if CAP == "none":
        return grad
    if CAP == "fast":
        return grad * (u - u * u)
    return grad * (1.0 - u * u)


@triton.jit
def _visible(query, key, query_ids, key_ids, T, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The element mask, broadcast over the two index vectors (one a row, one a column)."""
    seen = (query_ids == key_ids) & (key < T)
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW:
        seen = seen & (query - key < window)
    return seen


@triton.jit
def _span_kernel(
    ids, spans, T, window,
    BLOCK: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
    OWN_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(B, blocks, 4): which blocks of the other side a block of BLOCK keys (OWN_KEYS) or queries walks.

    A block needs no mask where every pair in it is seen. Such blocks count only while they are one run: out of
    order documents may leave gaps, and then the whole walk is masked.
    """
    block, batch = tl.program_id(0), tl.program_id(1)
    own_first = block * BLOCK
    own_last = tl.minimum(own_first + BLOCK, T) - 1
    own = tl.minimum(own_first + tl.arange(0, BLOCK), own_last)
    own_ids = tl.load(ids + batch.to(tl.int64) * T + own)
    own_low, own_high = tl.min(own_ids, 0), tl.max(own_ids, 0)
    begin, end = T, 0  # in blocks, and there are at most T
    full_begin, full_end, full_count = T, 0, 0
    for chunk in range(tl.cdiv(T, OTHER * CHUNK)):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        first, last = other * OTHER, other * OTHER + OTHER - 1
        at = tl.minimum(first[:, None] + tl.arange(0, OTHER)[None, :], T - 1)
        other_ids = tl.load(ids + batch.to(tl.int64) * T + at)
        low, high = tl.min(other_ids, 1), tl.max(other_ids, 1)
        if OWN_KEYS:
            nearest, farthest = first - own_last, last - own_first
        else:
            nearest, farthest = own_first - last, own_last - first
        walk = (first < T) & (low <= own_high) & (high >= own_low)
        full = (last < T) & (low == own_high) & (high == own_low)
        if CAUSAL:
            walk, full = walk & (farthest >= 0), full & (nearest >= 0)
        if WINDOW:
            walk, full = walk & (nearest < window), full & (farthest < window)
        begin = tl.minimum(begin, tl.min(tl.where(walk, other, T), 0))
        end = tl.maximum(end, tl.max(tl.where(walk, other + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(full, other, T), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(full, other + 1, 0), 0))
        full_count += tl.sum(full.to(tl.int32), 0)
    one_run = (full_count > 0) & (full_count == full_end - full_begin)
    row = spans + (batch * tl.num_programs(0) + block) * 4
    tl.store(row, begin)
    tl.store(row + 1, tl.where(one_run, full_begin, begin))
    tl.store(row + 2, tl.where(one_run, full_end, begin))
    tl.store(row + 3, end)


@triton.jit
def _vector(base, rows, T, CHECKED: tl.constexpr):
    """base[rows], zero outside."""
    if CHECKED:
        return tl.load(base + rows, mask=rows < T, other=0)
    return tl.load(base + rows)


@triton.jit
def _walk_length(walk, FULL: tl.constexpr):
    """How many blocks of the walk need no mask (FULL), or need it."""
    full = tl.load(walk + 2) - tl.load(walk + 1)
    if FULL:
        return full
    return tl.load(walk + 3) - tl.load(walk) - full


@triton.jit
def _walk_block(walk, step, FULL: tl.constexpr):
    """The step-th of them. The masked ones lie on both sides of the run of full ones."""
    begin, full_begin = tl.load(walk), tl.load(walk + 1)
    if FULL:
        return full_begin + step
    block = begin + step
    return tl.where(block < full_begin, block, block + tl.load(walk + 2) - full_begin)


@triton.jit
def _forward_kernel(
    q, k, v, ids, spans, out, lse, T, window, gain, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, ONLINE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """out and lse of M rows of one head. The longest walks (last blocks, if causal) are started first."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head = (first_token * Hq + head) * P
    kv_head = (first_token * Hkv + head // (Hq // Hkv)) * P
    rows = block * M + tl.arange(0, M)
    row_ids = _vector(ids + first_token, rows, T, True)
    query = _load(q + q_head, block * M, Hq * P, T, P, (M, BLOCK_P), True)
    largest = tl.full((M,), -1e30, tl.float32)  # finite: a row that has seen no key yet stays free of nan
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_P), tl.float32)
    walk = spans + (batch * tl.num_programs(1) + block) * 4
    for FULL in tl.static_range(2):
        for step in range(0, _walk_length(walk, FULL)):
            start = _walk_block(walk, step, FULL) * N
            key = _load(k + kv_head, start, Hkv * P, T, P, (N, BLOCK_P), not FULL)
            value = _load(v + kv_head, start, Hkv * P, T, P, (N, BLOCK_P), not FULL)
            x = tl.dot(query, tl.trans(key), input_precision="ieee")
            x = _capped(x * gain, CAP) * a + b
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = _vector(ids + first_token, columns, T, True)
                seen = _visible(
                    rows[:, None],
                    columns[None, :],
                    row_ids[:, None],
                    column_ids[None, :],
                    T,
                    window,
                    CAUSAL,
                    WINDOW,
                )
                x = tl.where(seen, x, float("-inf"))
            if ONLINE:
                before = largest
                largest = tl.maximum(before, tl.max(x, 1))
                shrink = tl.exp2(before - largest)
                total *= shrink
                acc *= shrink[:, None]
                x -= largest[:, None]
            p = tl.exp2(x)
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    if not ONLINE:
        largest = tl.zeros((M,), tl.float32)
    _store(out + q_head, block * M, Hq * P, T, P, acc / tl.where(total > 0, total, 1.0)[:, None])
    log = (largest + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453
    tl.store(lse + (batch.to(tl.int64) * Hq + head) * T + rows, log, mask=rows < T)


@triton.jit
def _rows_kernel(
    out,
    dout,
    lse,
    delta,
    shift,
    T,
    b,
    Hq: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    M: tl.constexpr,
):
    """delta = sum_p dout * out and shift = b - lse log2e, (B,Hq,T) fp32: p is then exp2(u * a + shift)."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    start = tl.program_id(1) * M
    base = (batch.to(tl.int64) * T * Hq + head) * P
    o = _load(out + base, start, Hq * P, T, P, (M, BLOCK_P), True).to(tl.float32)
    do = _load(dout + base, start, Hq * P, T, P, (M, BLOCK_P), True).to(tl.float32)
    rows = start + tl.arange(0, M)
    at = (batch.to(tl.int64) * Hq + head) * T + rows
    tl.store(delta + at, tl.sum(o * do, 1), mask=rows < T)
    log = tl.load(lse + at, mask=rows < T, other=0.0)
    tl.store(shift + at, b - log * 1.4426950408889634, mask=rows < T)


@triton.jit
def _dkdv_kernel(
    q, k, v, ids, spans, dout, delta, shift, dk, dv, T, window, gain, a, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one key/value head. Logits are held transposed, (N,M), so that P and dS come out
    of one product in the registers where the next one wants them."""
    R: tl.constexpr = Hq // Hkv
    batch, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    block = tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    kv_head = (first_token * Hkv + group) * P
    columns = block * N + tl.arange(0, N)
    column_ids = _vector(ids + first_token, columns, T, True)
    key = _load(k + kv_head, block * N, Hkv * P, T, P, (N, BLOCK_P), True)
    value = _load(v + kv_head, block * N, Hkv * P, T, P, (N, BLOCK_P), True)
    dkey = tl.zeros((N, BLOCK_P), tl.float32)
    dvalue = tl.zeros((N, BLOCK_P), tl.float32)
    walk = spans + (batch * tl.num_programs(1) + block) * 4
    for part in tl.static_range(3):
        begin = tl.load(walk + part)
        count = tl.load(walk + part + 1) - begin
        for step in range(R * count):  # one loop over heads and blocks, so that its loads stay ahead
            head = group * R + step // count
            start = (begin + step % count) * M
            rows = start + tl.arange(0, M)
            q_head = (first_token * Hq + head) * P
            q_row = (batch.to(tl.int64) * Hq + head) * T
            query = _load(q + q_head, start, Hq * P, T, P, (M, BLOCK_P), not FULL)
            do = _load(dout + q_head, start, Hq * P, T, P, (M, BLOCK_P), not FULL)
            x = tl.dot(key, tl.trans(query), input_precision="ieee")
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")
            u = _capped(x * gain, CAP)
            row_shift = _vector(shift + q_row, rows, T, not FULL)
            x = u * a + row_shift[None, :]
            if not FULL:
                row_ids = _vector(ids + first_token, rows, T, True)
                seen = _visible(
                    rows[None, :],
                    columns[:, None],
                    row_ids[None, :],
                    column_ids[:, None],
                    T,
                    window,
                    CAUSAL,
                    WINDOW,
                )
                x = tl.where(seen, x, float("-inf"))
            p = tl.exp2(x)
            slope = _through_cap(p, u, CAP)  # before dp is there: of S, only this and P in low precision live on
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            row_delta = _vector(delta + q_row, rows, T, not FULL)
            ds = slope * (dp - row_delta[None, :])
            dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    _store(dk + kv_head, block * N, Hkv * P, T, P, dkey * gain_out)
    _store(dv + kv_head, block * N, Hkv * P, T, P, dvalue)


@triton.jit
def _dq_kernel(
    q, k, v, ids, spans, dout, delta, shift, dq, T, window, gain, a, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dQ of M rows of one head, walking the key blocks as the forward does."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head = (first_token * Hq + head) * P
    kv_head = (first_token * Hkv + head // (Hq // Hkv)) * P
    rows = block * M + tl.arange(0, M)
    q_row = (batch.to(tl.int64) * Hq + head) * T
    row_ids = _vector(ids + first_token, rows, T, True)
    row_shift = _vector(shift + q_row, rows, T, True)
    row_delta = _vector(delta + q_row, rows, T, True)
    query = _load(q + q_head, block * M, Hq * P, T, P, (M, BLOCK_P), True)
    do = _load(dout + q_head, block * M, Hq * P, T, P, (M, BLOCK_P), True)
    dquery = tl.zeros((M, BLOCK_P), tl.float32)
    walk = spans + (batch * tl.num_programs(1) + block) * 4
    for FULL in tl.static_range(2):
        for step in range(0, _walk_length(walk, FULL)):
            start = _walk_block(walk, step, FULL) * N
            key = _load(k + kv_head, start, Hkv * P, T, P, (N, BLOCK_P), not FULL)
            value = _load(v + kv_head, start, Hkv * P, T, P, (N, BLOCK_P), not FULL)
            u = _capped(tl.dot(query, tl.trans(key), input_precision="ieee") * gain, CAP)
            x = u * a + row_shift[:, None]
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = _vector(ids + first_token, columns, T, True)
                seen = _visible(
                    rows[:, None],
                    columns[None, :],
                    row_ids[:, None],
                    column_ids[None, :],
                    T,
                    window,
                    CAUSAL,
                    WINDOW,
                )
                x = tl.where(seen, x, float("-inf"))
            dp = tl.dot(do, tl.trans(value), input_precision="ieee")
            ds = _through_cap(tl.exp2(x) * (dp - row_delta[:, None]), u, CAP)
            dquery = tl.dot(ds.to(key.dtype), key, dquery, input_precision="ieee")
    _store(dq + q_head, block * M, Hq * P, T, P, dquery * gain_out)


class Tile(NamedTuple):
    """M query rows, N keys, and how Triton is to run them."""

    M: int
    N: int
    warps: int
    stages: int


def _tiles(P: int, dtype: torch.dtype) -> dict[str, Tile]:
    """The blocks of each kernel. fp32 runs on the plain FMA units and out of registers much sooner."""
    if dtype == torch.float32:
        small = Tile(32, 32, 4, 1) if P <= 64 else Tile(16, 16, 4, 1)
        return {"forward": small, "dkdv": small, "dq": small}
    if P <= 64:
        return {"forward": Tile(128, 128, 8, 2), "dkdv": Tile(64, 128, 8, 2), "dq": Tile(128, 64, 8, 2)}
    if P == 128:
        return {"forward": Tile(128, 64, 8, 2), "dkdv": Tile(64, 128, 8, 2), "dq": Tile(128, 64, 8, 2)}
    return {"forward": Tile(64, 32, 4, 2), "dkdv": Tile(32, 64, 8, 1), "dq": Tile(64, 32, 8, 1)}


class _Logit(NamedTuple):
    """How the softcap is computed, and the constants of the module's table."""

    CAP: str
    gain: float
    a: float
    b: float
    gain_out: float


def _logit(scale: float, softcap: float, dtype: torch.dtype) -> _Logit:
    if softcap == 0:
        return _Logit("none", 1.0, scale * LOG2E, 0.0, scale)
    a = softcap * LOG2E
    if dtype == torch.float32:
        return _Logit("exact", scale / softcap, a, 0.0, scale)
    return _Logit("fast", 2 * LOG2E * scale / softcap, -2 * a, a, 4 * scale)


def _head_dim(P: int) -> int:
    """The padded head dim: a matrix product is at least 16 wide."""
    if P & (P - 1) or not 1 <= P <= 256:
        raise ValueError(f"attention: head dim must be a power of two up to 256 on CUDA, not {P}")
    return max(P, 16)


def _spans(doc_ids: Tensor, own: int, other: int, own_keys: bool, window: int, causal: bool) -> Tensor:
    """(B, blocks, 4) int32, see `_span_kernel`."""
    B, T = doc_ids.shape
    spans = doc_ids.new_empty((B, triton.cdiv(T, own), 4))
    _span_kernel[spans.shape[1], B](
        doc_ids, spans, T, window, BLOCK=own, OTHER=other, CHUNK=max(1, 4096 // other),
        OWN_KEYS=own_keys, CAUSAL=causal, WINDOW=window > 0, num_warps=4,
    )  # fmt: skip
    return spans


def attention_fwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float, softcap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """q (B,T,Hq,P), k and v (B,T,Hkv,P) fp32, fp16 or bf16, doc_ids (B,T) int32 -> out (B,T,Hq,P) in q.dtype,
    lse (B,Hq,T) fp32. Inputs that are not contiguous are copied. Raises ValueError on P no power of two <= 256."""
    B, T, Hq, P = q.shape
    BLOCK_P = _head_dim(P)
    q, k, v, doc_ids = (t.contiguous() for t in (q, k, v, doc_ids))
    tile = _tiles(P, q.dtype)["forward"]
    logit = _logit(scale, softcap, q.dtype)
    online = softcap == 0 or softcap > LARGEST_UNSHIFTED_CAP or q.dtype == torch.float16
    spans = _spans(doc_ids, tile.M, tile.N, False, window, causal)
    out, lse = torch.empty_like(q), q.new_empty((B, Hq, T), dtype=torch.float32)
    _forward_kernel[B * Hq, spans.shape[1]](
        q, k, v, doc_ids, spans, out, lse, T, window, logit.gain, logit.a, logit.b,
        Hq=Hq, Hkv=k.shape[2], P=P, BLOCK_P=BLOCK_P, M=tile.M, N=tile.N,
        CAP=logit.CAP, ONLINE=online, CAUSAL=causal, WINDOW=window > 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def attention_bwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in their shapes and dtype; bit-repeatable. Arguments and errors as the forward's."""
    B, T, Hq, P = q.shape
    Hkv, BLOCK_P = k.shape[2], _head_dim(P)
    q, k, v, doc_ids, out, lse, dout = (t.contiguous() for t in (q, k, v, doc_ids, out, lse, dout))
    tiles, logit = _tiles(P, q.dtype), _logit(scale, softcap, q.dtype)
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    rows = 64
    _rows_kernel[B * Hq, triton.cdiv(T, rows)](
        out, dout, lse, delta, shift, T, logit.b, Hq=Hq, P=P, BLOCK_P=BLOCK_P, M=rows, num_warps=4
    )
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    shared = (q, k, v, doc_ids)
    rest = (T, window, logit.gain, logit.a, logit.gain_out)
    options = dict(Hq=Hq, Hkv=Hkv, P=P, BLOCK_P=BLOCK_P, CAP=logit.CAP, CAUSAL=causal, WINDOW=window > 0)
    M, N, warps, stages = tiles["dkdv"]
    spans = _spans(doc_ids, N, M, True, window, causal)
    _dkdv_kernel[B * Hkv, spans.shape[1]](
        *shared,
        spans,
        dout,
        delta,
        shift,
        dk,
        dv,
        *rest,
        M=M,
        N=N,
        **options,
        num_warps=warps,
        num_stages=stages,
    )
    M, N, warps, stages = tiles["dq"]
    spans = _spans(doc_ids, M, N, False, window, causal)
    _dq_kernel[B * Hq, spans.shape[1]](
        *shared, spans, dout, delta, shift, dq, *rest, M=M, N=N, **options, num_warps=warps, num_stages=stages
    )
    return dq, dk, dv
