"""Tiles of a matrix, one vector per row, and the element mask of the attention kernels.

T tokens, P columns (WIDTH: padded to a power of two, at least 16), M query rows and N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    x_ptr, start, stride, T, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr
):
    """Load rows of a (T,P) matrix from `start` on as a (ROWS,WIDTH) tile, zero outside. EVEN: all rows are inside."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    # 64-bit offsets throughout, constant part last: the compiler then keeps fewer address registers.
    at = x_ptr + (start.to(tl.int64) * stride + column.to(tl.int64)) + row.to(tl.int64) * stride
    if EVEN and P == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(start + row < T) & (column < P), other=0.0)


@triton.jit
def store_tile(x_ptr, start, stride, T, P: tl.constexpr, tile, LONG_ROWS: tl.constexpr):
    """Store the part of a (ROWS,WIDTH) tile that is inside the (T,P) matrix, from row `start` on.

    LONG_ROWS: offsets inside the tile have 64 bits, too; which form takes fewer registers depends on the kernel.
    """
    row = tl.arange(0, tile.shape[0])[:, None]
    column = tl.arange(0, tile.shape[1])[None, :]
    inner = row.to(tl.int64) * stride if LONG_ROWS else row * stride
    at = x_ptr + start.to(tl.int64) * stride + inner + column
    tl.store(at, tile.to(x_ptr.dtype.element_ty), mask=(start + row < T) & (column < P))


@triton.jit
def load_vector(base_ptr, rows, T, EVEN: tl.constexpr):
    """Load one element per row, zero past T. EVEN: all rows are inside."""
    if EVEN:
        return tl.load(base_ptr + rows)
    return tl.load(base_ptr + rows, mask=rows < T, other=0)


@triton.jit
def apply_mask(
    x, rows, columns, row_ids, column_ids, T,
    TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Set x (M,N), or (N,M) if TRANSPOSED, to -inf where the query may not attend to the key.

    Visible: a key of the same document, not in the future if CAUSAL, at most WINDOW - 1 tokens back if WINDOW > 0.
    """
    across: tl.constexpr = 0 if TRANSPOSED else 1
    query, query_ids = tl.expand_dims(rows, across), tl.expand_dims(row_ids, across)
    key, key_ids = tl.expand_dims(columns, 1 - across), tl.expand_dims(column_ids, 1 - across)
    visible = query_ids == key_ids
    if not EVEN:
        visible = visible & (key < T)
    if CAUSAL:
        visible = visible & (key <= query)
    if WINDOW > 0:
        visible = visible & (query - key < WINDOW)
    return tl.where(visible, x, float("-inf"))
