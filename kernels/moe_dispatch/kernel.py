"""moe_dispatch in Triton, forward and backward.

Forward, two kernels. `_slots_kernel`: one program per expert and sequence reads the sequence's assignments in
order, BLOCK at a time; a running count plus a prefix sum inside the block gives the slots of its own assignments.
Slots therefore follow token order by construction, without atomics and without an extra pass to sum counts; the
ids are read E times, from the L2 cache. It also records which token each row of the output contains, if any.
`_rows_kernel`: one program per row copies that token or writes zeros, so that every row is written once. Programs
iterate over the experts first and the slots of a sequence last: programs that run together then read nearby tokens,
and the K copies of a token come from the cache.
The only atomic is the integer count of dropped assignments, whose order does not matter.

Backward: one program per token sums its K rows in fp32 and writes the sum. No atomics.

Bytes at B4 T4096 K6 E64 D3584 bucket 512 in bf16: forward reads x and writes E B C rows, 117 + 940 MB, 0.250 ms
at 4.22 TB/s; backward reads the kept rows and writes dx, 705 + 117 MB, 0.195 ms.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS_BLOCK, SLOTS_WARPS = 2048, 8
ROWS_BLOCK, ROWS_WARPS = 4096, 4
BACKWARD_BLOCK, BACKWARD_WARPS = 2048, 4


@triton.jit
def _slots_kernel(expert_ptr, slot_ptr, source_ptr, overflow_ptr, T, K, C, BLOCK: tl.constexpr):
    e, b, B = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    M = T * K
    first = b.to(tl.int64) * M
    rows = source_ptr + (e.to(tl.int64) * B + b) * C
    taken = tl.zeros((), tl.int32)
    for start in tl.range(0, M, BLOCK, num_stages=3):
        m = start + tl.arange(0, BLOCK)
        mine = tl.load(expert_ptr + first + m, mask=m < M, other=-1) == e
        position = taken + tl.cumsum(mine.to(tl.int32), 0) - 1
        kept = position < C
        tl.store(slot_ptr + first + m, tl.where(kept, position, -1).to(tl.int64), mask=mine)
        tl.store(rows + position, b * T + m // K, mask=mine & kept)
        taken += tl.sum(mine.to(tl.int32), 0)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(rows + c, tl.zeros((BLOCK,), tl.int32) - 1, mask=(c >= taken) & (c < C))
    tl.atomic_add(overflow_ptr, tl.maximum(taken - C, 0).to(tl.int64))


@triton.jit
def _rows_kernel(x_ptr, source_ptr, padded_ptr, D, BLOCK: tl.constexpr):
    e, c, C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = (e * tl.num_programs(2) + tl.program_id(2)) * C + c
    token = tl.load(source_ptr + row).to(tl.int64)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + token * D + d, mask=(d < D) & (token >= 0), other=0)
        tl.store(padded_ptr + row * D + d, values, mask=d < D)


@triton.jit
def _append(items, item):
    return items + (item,)  # noqa: RUF005 (Triton has no starred items)


@triton.jit
def _backward_kernel(
    dpadded_ptr, expert_ptr, slot_ptr, dx_ptr, D, C, K: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    b, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    token = b * tl.num_programs(0) + tl.program_id(0)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slots, experts, rows = (), (), ()
    for k in tl.static_range(K):  # issue all loads of a kind before the first use
        slots = _append(slots, tl.load(slot_ptr + token * K + k))
        experts = _append(experts, tl.load(expert_ptr + token * K + k))
    for k in tl.static_range(K):
        at = dpadded_ptr + ((experts[k] * B + b) * C + slots[k]) * D
        rows = _append(rows, tl.load(at + d, mask=(d < D) & (slots[k] >= 0), other=0))
    total = tl.zeros((BLOCK,), ACC)
    for k in tl.static_range(K):
        total += rows[k].to(ACC)
    tl.store(dx_ptr + token * D + d, total.to(dx_ptr.dtype.element_ty), mask=d < D)


def moe_dispatch_fwd_kernel(
    x: Tensor, expert: Tensor, num_experts: int, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement bumpgate::moe_dispatch_fwd: x (B,T,D), expert (B,T,K) int64
    -> padded (E, B*C, D), slot (B,T,K) int64, overflow () int64."""
    B, T, D = x.shape
    E, K, C = num_experts, expert.shape[2], bucket
    padded = x.new_empty((E, B * C, D))
    slot = expert.new_full(expert.shape, -1)  # null assignments are written by no program
    overflow = expert.new_zeros(())
    source = expert.new_empty((E, B, C), dtype=torch.int32)
    _slots_kernel[E, B](
        expert.contiguous(), slot, source, overflow, T, K, C, BLOCK=SLOTS_BLOCK, num_warps=SLOTS_WARPS
    )
    _rows_kernel[E, C, B](x.contiguous(), source, padded, D, BLOCK=ROWS_BLOCK, num_warps=ROWS_WARPS)
    return padded, slot, overflow


def moe_dispatch_bwd_kernel(dpadded: Tensor, expert: Tensor, slot: Tensor, bucket: int) -> Tensor:
    """Implement bumpgate::moe_dispatch_bwd: dpadded (E, B*C, D) -> dx (B,T,D)."""
    (B, T, K), D = expert.shape, dpadded.shape[2]
    dx = dpadded.new_empty((B, T, D))
    acc = tl.float64 if dpadded.dtype == torch.float64 else tl.float32
    _backward_kernel[T, B, triton.cdiv(D, BACKWARD_BLOCK)](
        dpadded.contiguous(), expert.contiguous(), slot.contiguous(), dx, D, bucket,
        K=K, ACC=acc, BLOCK=BACKWARD_BLOCK, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return dx
