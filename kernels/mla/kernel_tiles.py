"""Functions shared by the kernels of mla: tile loads and stores, the softcap, the mask, and the block loops.

`_span_kernel` first finds which blocks a program loops over: one run of blocks that need no element mask (one
document, below the diagonal) and the ones on both sides of it that do. Documents need not be sorted.

A logit is kept as its base-2 form u * a + b, where u is x = gain * q.k after the softcap c:

    CAP       u                                               ds/dx ~       a               b
    "none"    x                                               1             scale log2e     0
    "exact"   tanh(x), x = s/c                                1 - u^2       c log2e         0
    "fast"    1/(1 + 2^x) = (1 - tanh(s/c))/2                 u - u^2       -2 c log2e      c log2e

"fast" has an absolute error of 1e-7 c, "exact" a relative one: for c <= 64 negligible next to the rounding of P to
bf16 or fp16, but too large for fp32.

T tokens, M query rows and N keys of a block. Source: softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load(x, start, stride, T, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load rows start.. of a (T,P) matrix as a (ROWS,WIDTH) tile, zero outside. EVEN: all rows are in range."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    # 64-bit offsets throughout, constant part last: the compiler then keeps fewer address registers.
    at = x + (start.to(tl.int64) * stride + column.to(tl.int64)) + row.to(tl.int64) * stride
    if EVEN and P == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(start + row < T) & (column < P), other=0.0)


@triton.jit
def store(x, start, stride, T, P: tl.constexpr, tile):
    row = tl.arange(0, tile.shape[0])[:, None]
    column = tl.arange(0, tile.shape[1])[None, :]
    at = x + start.to(tl.int64) * stride + row.to(tl.int64) * stride + column
    tl.store(at, tile.to(x.dtype.element_ty), mask=(start + row < T) & (column < P))


@triton.jit
def vector(base, rows, T, EVEN: tl.constexpr):
    """base[rows], zero outside."""
    if EVEN:
        return tl.load(base + rows)
    return tl.load(base + rows, mask=rows < T, other=0)


@triton.jit
def capped(x, CAP: tl.constexpr):
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
def through_cap(grad, u, CAP: tl.constexpr):
    """grad times the derivative of the softcap, without the constant factor, which is in `gain_out`."""
    if CAP == "none":
        return grad
    return grad * ((u if CAP == "fast" else 1.0) - u * u)


@triton.jit
def hide(x, rows, columns, row_ids, column_ids, T, TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr):
    """Mask x (M,N), or (N,M) if TRANSPOSED: -inf where the query of a row may not attend to the key of a column."""
    across: tl.constexpr = 0 if TRANSPOSED else 1
    query, query_ids = tl.expand_dims(rows, across), tl.expand_dims(row_ids, across)
    key, key_ids = tl.expand_dims(columns, 1 - across), tl.expand_dims(column_ids, 1 - across)
    seen = (query_ids == key_ids) & (key < T)
    if CAUSAL:
        seen = seen & (key <= query)
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _span_kernel(
    ids, spans, T,
    OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr, OWN_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write spans (B, blocks, 4): the loop of a block of OWN keys (OWN_KEYS) or queries over blocks of OTHER.

    Each entry: first block, masked blocks before the full run, full blocks, masked blocks. A full block has every pair
    visible. Full blocks are used only if they form one run; out-of-order documents may leave gaps in it.
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
        walk = (first < T) & (low <= own_high) & (high >= own_low)
        full = (last < T) & (low == own_high) & (high == own_low)
        if CAUSAL and OWN_KEYS:
            walk, full = walk & (last >= own_first), full & (first >= own_last)
        elif CAUSAL:
            walk, full = walk & (own_last >= first), full & (own_first >= last)
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
def walk_block(step, begin, before, full, FULL: tl.constexpr):
    """Index of the step-th block that needs no mask (FULL), or of the step-th that needs one."""
    if FULL:
        return begin + before + step
    return begin + step + tl.where(step < before, 0, full)


def spans_of(doc_ids: Tensor, own: int, other: int, own_keys: bool, causal: bool) -> Tensor:
    """(B, blocks, 4) int32, see `_span_kernel`: loops of blocks of `own` keys or queries over blocks of `other`."""
    B, T = doc_ids.shape
    spans = doc_ids.new_empty((B, triton.cdiv(T, own), 4))
    _span_kernel[spans.shape[1], B](
        doc_ids,
        spans,
        T,
        OWN=own,
        OTHER=other,
        CHUNK=2048 // other,
        OWN_KEYS=own_keys,
        CAUSAL=causal,
        num_warps=4,
    )
    return spans
