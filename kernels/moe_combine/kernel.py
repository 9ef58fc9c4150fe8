"""moe_combine in Triton, forward and backward.

Forward: one program per token reads its K rows, multiplies and adds in fp32, casts once. No atomics.

Backward: `_owners_kernel` records for each row of y which assignment owns it (at most one: a slot is assigned
once). Then one program per row reads the row and its token's gradient, and writes the row's gradient and the
weight's, which is their inner product. Rows without owner are written as zeros, so that every row is
written once, without atomics. Programs iterate over the experts first and the slots of a sequence last: programs
that run together then need nearby tokens, and the K reads of a token's gradient hit the cache.

Bytes at B4 T4096 K6 E64 D3584 bucket 512 in bf16, nothing dropped: forward 705 + 117 MB, 0.195 ms at 4.22 TB/s;
backward reads the owned rows and dout and writes E B C rows, 705 + 117 + 940 MB, 0.417 ms.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK, FORWARD_WARPS = 2048, 4
BACKWARD_BLOCK, BACKWARD_WARPS = 4096, 4
OWNERS_BLOCK = 1024


@triton.jit
def _append(items, item):
    return items + (item,)  # noqa: RUF005 (Triton has no starred items)


@triton.jit
def _forward_kernel(
    y_ptr,
    expert_ptr,
    slot_ptr,
    weights_ptr,
    out_ptr,
    D,
    C,
    K: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    token = b * tl.num_programs(0) + tl.program_id(0)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slots, experts, shares, rows = (), (), (), ()
    for k in tl.static_range(K):  # issue all loads of a kind before the first use
        slots = _append(slots, tl.load(slot_ptr + token * K + k))
        experts = _append(experts, tl.load(expert_ptr + token * K + k))
        shares = _append(shares, tl.load(weights_ptr + token * K + k).to(ACC))
    for k in tl.static_range(K):
        at = y_ptr + ((experts[k] * B + b) * C + slots[k]) * D
        rows = _append(rows, tl.load(at + d, mask=(d < D) & (slots[k] >= 0), other=0))
    total = tl.zeros((BLOCK,), ACC)
    for k in tl.static_range(K):
        # A select, not a product with 0: the weight of a dropped assignment may be inf or nan.
        total += tl.where(slots[k] >= 0, shares[k], 0.0) * rows[k].to(ACC)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _owners_kernel(expert_ptr, slot_ptr, owner_ptr, M, C, BLOCK: tl.constexpr):
    """Write owner[row], the assignment in 0..B*T*K that owns the row. M: assignments per sequence."""
    b, B = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.load(slot_ptr + b * M + m, mask=m < M, other=-1)
    row = (tl.load(expert_ptr + b * M + m, mask=m < M, other=0) * B + b) * C + c
    tl.store(owner_ptr + row, b * M + m, mask=c >= 0)


@triton.jit
def _backward_kernel(
    y_ptr,
    weights_ptr,
    owner_ptr,
    dout_ptr,
    dy_ptr,
    dweights_ptr,
    D,
    K,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e, c, C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = (e * tl.num_programs(2) + tl.program_id(2)) * C + c
    n = tl.load(owner_ptr + row)
    token = (n // K).to(tl.int64)
    weight = tl.load(weights_ptr + n, mask=n >= 0, other=0).to(ACC)
    product = tl.zeros((), ACC)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        there = (d < D) & (n >= 0)
        gradient = tl.load(dout_ptr + token * D + d, mask=there, other=0).to(ACC)
        output = tl.load(y_ptr + row * D + d, mask=there, other=0).to(ACC)
        tl.store(dy_ptr + row * D + d, (weight * gradient).to(dy_ptr.dtype.element_ty), mask=d < D)
        product += tl.sum(gradient * output, 0)
    tl.store(dweights_ptr + n, product.to(dweights_ptr.dtype.element_ty), mask=n >= 0)


def _accumulator(y: Tensor, weights: Tensor) -> tl.dtype:
    return tl.float64 if torch.float64 in (y.dtype, weights.dtype) else tl.float32


def moe_combine_fwd_kernel(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, out_dtype: torch.dtype
) -> Tensor:
    """Implement bumpgate::moe_combine_fwd: y (E, B*C, D), expert and slot (B,T,K) int64,
    weights (B,T,K) fp32 -> out (B,T,D) in out_dtype."""
    (B, T, K), D = expert.shape, y.shape[2]
    out = y.new_empty((B, T, D), dtype=out_dtype)
    _forward_kernel[T, B, triton.cdiv(D, FORWARD_BLOCK)](
        y.contiguous(), expert.contiguous(), slot.contiguous(), weights.contiguous(), out, D, bucket,
        K=K, ACC=_accumulator(y, weights), BLOCK=FORWARD_BLOCK, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return out


def moe_combine_bwd_kernel(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement bumpgate::moe_combine_bwd: gradients of y (E, B*C, D) and weights (B,T,K).

    No two assignments may share a row; moe_dispatch guarantees this.
    """
    (B, T, K), E, D = expert.shape, y.shape[0], y.shape[2]
    dy, dweights = y.new_empty(y.shape), weights.new_zeros(weights.shape)
    owner = expert.new_full((E, B, bucket), -1, dtype=torch.int32)
    _owners_kernel[triton.cdiv(T * K, OWNERS_BLOCK), B](
        expert.contiguous(), slot.contiguous(), owner, T * K, bucket, BLOCK=OWNERS_BLOCK
    )
    _backward_kernel[E, bucket, B](
        y.contiguous(), weights.contiguous(), owner, dout.contiguous(), dy, dweights, D, K,
        ACC=_accumulator(y, weights), BLOCK=BACKWARD_BLOCK, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return dy, dweights
