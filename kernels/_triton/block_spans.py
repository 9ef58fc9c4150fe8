"""Which blocks of keys or queries an attention kernel loops over, from the document ids.

One run of blocks needs no element mask (one document, below the diagonal, inside the window); the blocks on both sides
of it do. Documents need not be sorted: a block is skipped only if the ranges of ids are disjoint; inside a block, ids
are compared. T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _span_kernel(
    ids_ptr, spans_ptr, T, OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
    OWN_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write spans (B, blocks, 4): the loop of a block of OWN keys (OWN_KEYS) or queries over blocks of OTHER.

    Each entry: first block, masked blocks before the full run, full blocks, masked blocks. A full block has
    every pair visible. Full blocks are used only if they form one run; out-of-order documents may leave gaps.
    WINDOW: 0 for none, -1 for an op without windows.
    """
    block, batch = tl.program_id(0), tl.program_id(1)
    ids_ptr += batch.to(tl.int64) * T
    own_first = block * OWN
    own_last = tl.minimum(own_first + OWN, T) - 1
    own_ids = tl.load(ids_ptr + tl.minimum(own_first + tl.arange(0, OWN), own_last))
    own_low, own_high = tl.min(own_ids, 0), tl.max(own_ids, 0)
    begin, end, full_begin, full_end, full_count = T, 0, T, 0, 0  # in blocks: there are at most T
    for chunk in range(tl.cdiv(T, OTHER * CHUNK)):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        first, last = other * OTHER, other * OTHER + OTHER - 1
        other_ids = tl.load(ids_ptr + tl.minimum(first[:, None] + tl.arange(0, OTHER)[None, :], T - 1))
        low, high = tl.min(other_ids, 1), tl.max(other_ids, 1)
        if WINDOW >= 0:  # before the masks: after them triton 3.7.1 takes more registers, and spills in fp32
            if OWN_KEYS:
                nearest, farthest = first - own_last, last - own_first
            else:
                nearest, farthest = own_first - last, own_last - first
        visit = (first < T) & (low <= own_high) & (high >= own_low)
        full = (last < T) & (low == own_high) & (high == own_low)
        if WINDOW >= 0:
            if CAUSAL:
                visit, full = visit & (farthest >= 0), full & (nearest >= 0)
            if WINDOW > 0:
                visit, full = visit & (nearest < WINDOW), full & (farthest < WINDOW)
        elif CAUSAL:  # without differences, which take 8 more registers
            if OWN_KEYS:
                visit, full = visit & (last >= own_first), full & (first >= own_last)
            else:
                visit, full = visit & (own_last >= first), full & (own_first >= last)
        begin = tl.minimum(begin, tl.min(tl.where(visit, other, T), 0))
        end = tl.maximum(end, tl.max(tl.where(visit, other + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(full, other, T), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(full, other + 1, 0), 0))
        full_count += tl.sum(full.to(tl.int32), 0)
    run = tl.where(full_count == full_end - full_begin, full_count, 0)
    span = spans_ptr + (batch * tl.num_programs(0) + block) * 4
    tl.store(span, begin)
    tl.store(span + 1, tl.where(run > 0, full_begin - begin, 0))
    tl.store(span + 2, run)
    tl.store(span + 3, tl.maximum(end - begin, 0) - run)


@triton.jit
def loop_block(step, begin, before, full, FULL: tl.constexpr):
    """Return the index of the step-th block that needs no mask (FULL), or of the step-th that needs one."""
    if FULL:
        return begin + before + step
    return begin + step + tl.where(step < before, 0, full)


def block_spans(
    doc_ids: Tensor, own: int, other: int, own_keys: bool, causal: bool, window: int = -1,
    tokens: int = 4096, num_warps: int = 8,
) -> Tensor:  # fmt: skip
    """Return (B, blocks, 4) int32: the loop of each block of `own` keys or queries over blocks of `other`.

    Each entry as in `_span_kernel`, which reads `tokens` ids at a time.
    """
    B, T = doc_ids.shape
    spans = doc_ids.new_empty((B, triton.cdiv(T, own), 4))
    _span_kernel[spans.shape[1], B](
        doc_ids, spans, T, OWN=own, OTHER=other, CHUNK=tokens // other,
        OWN_KEYS=own_keys, CAUSAL=causal, WINDOW=window, num_warps=num_warps,
    )  # fmt: skip
    return spans
