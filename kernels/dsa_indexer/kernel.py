"""dsa_attention in Triton: keys are gathered for each query; for each key block, query blocks are looped over.

kernel_choice.py selects the keys, kernel_loss.py computes the indexer's loss.

    forward     one program per (query, key/value head): its R query heads are the rows of a tile. Its K keys are read
                N at a time, each a row of P adjacent numbers. Online softmax. Writes out and lse.
    dQ          the same loop; also computes delta = sum_p dout * out, and the logsumexp in base 2.
    dK, dV      one program per (key block, key/value head). It loops over the query blocks that chose any of its keys
                and masks the pairs that were not chosen. Sums stay in registers: bitwise deterministic.

Why dK and dV are not gathered: a key would fetch the q and dout rows of every query that chose it, 4 R P bytes for
4 R P multiply-adds without tensor cores: 60 GB from L2 at B 4, T 4096, K 256, 56 heads of 64 on 8. fp32 atomics in the
queries' programs would move 17 GB and not be deterministic. A block of N keys and M queries costs one tile of dense
attention's products instead. At T = 4096, K = 256 leaves few blocks empty, and the loop is as long as in dense
attention; at longer T it is shorter only where chosen keys are close together. The mask is one byte per pair, (B,T,T),
key-major, made by a scatter that writes only ones, so the order does not matter.

Bytes of a gathering pass: 4 K P per query and key/value head, from L2: 8.6 GB at the sizes above.

B batch, T tokens, K chosen keys per query, Hq and Hkv heads, R = Hq / Hkv, P head dim (WIDTH: padded to 16), M query
rows and N keys of a tile. Sources: DeepSeek-V3.2-Exp (2025), FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.constants import LN2, LOG2E, LOWEST
from kernels._triton.softcap import apply_softcap, softcap_bwd, softcap_params
from kernels.dsa_indexer.kernel_choice import dsa_indexer_fwd_kernel
from kernels.dsa_indexer.kernel_loss import (
    dsa_chosen_scores_bwd_kernel,
    dsa_chosen_scores_fwd_kernel,
    dsa_distribution_fwd_kernel,
)
from kernels.dsa_indexer.kernel_tiles import by_key, checked_width, gather_rows, query_blocks

__all__ = [
    "dsa_attention_bwd_kernel",
    "dsa_attention_fwd_kernel",
    "dsa_chosen_scores_bwd_kernel",
    "dsa_chosen_scores_fwd_kernel",
    "dsa_distribution_fwd_kernel",
    "dsa_indexer_fwd_kernel",
]


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, out_ptr, lse_ptr, T, K, qk_scale, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """out and lse of one query and the R heads of one group. Groups are adjacent: they read the same tokens."""
    R: tl.constexpr = Hq // Hkv
    token, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    batch, within = (token // T).to(tl.int64), token % T  # 32-bit division: a 64-bit one is a function call
    token = token.to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    q_at = (token * Hq + group * R + head) * P
    query = gather_rows(q_ptr, q_at, columns, head < R, P)
    largest = tl.full((M,), LOWEST, tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WIDTH), tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices_ptr + token * K + place, mask=place < K, other=-1)
        at = ((batch * T + index) * Hkv + group) * P
        key, value = (
            gather_rows(k_ptr, at, columns, index >= 0, P),
            gather_rows(v_ptr, at, columns, index >= 0, P),
        )
        x = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee") * qk_scale, SOFTCAP) * a + b
        x = tl.where((index >= 0)[None, :], x, float("-inf"))
        lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
        shrink = tl.exp2(lower - largest)
        p = tl.exp2(x - largest[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    some = total > 0
    total = tl.where(some, total, 1.0)
    mask = (head < R)[:, None] & (columns < P)[None, :]
    tl.store(
        out_ptr + q_at[:, None] + columns[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=mask,
    )
    at = (batch * Hq + group * R + head) * T + within
    log = tl.where(some, (largest + tl.log2(total)) * LN2, 0.0)
    tl.store(lse_ptr + at, log, mask=head < R)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, shift_ptr, dq_ptr, T, K, qk_scale,
    a, b, grad_scale,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dQ, delta and shift = b - lse log2e of one query and group, with the key loop of the forward."""
    R: tl.constexpr = Hq // Hkv
    token, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    batch, within = (token // T).to(tl.int64), token % T  # 32-bit division: a 64-bit one is a function call
    token = token.to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    q_at = (token * Hq + group * R + head) * P
    row_at = (batch * Hq + group * R + head) * T + within
    query, do = (
        gather_rows(q_ptr, q_at, columns, head < R, P),
        gather_rows(dout_ptr, q_at, columns, head < R, P),
    )
    o = gather_rows(out_ptr, q_at, columns, head < R, P)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_shift = b - tl.load(lse_ptr + row_at, mask=head < R, other=0.0) * LOG2E
    tl.store(delta_ptr + row_at, row_delta, mask=head < R)
    tl.store(shift_ptr + row_at, row_shift, mask=head < R)
    dquery = tl.zeros((M, WIDTH), tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices_ptr + token * K + place, mask=place < K, other=-1)
        at = ((batch * T + index) * Hkv + group) * P
        key, value = (
            gather_rows(k_ptr, at, columns, index >= 0, P),
            gather_rows(v_ptr, at, columns, index >= 0, P),
        )
        u = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee") * qk_scale, SOFTCAP)
        dp = tl.dot(do, tl.trans(value), input_precision="ieee")
        p = tl.exp2(tl.where((index >= 0)[None, :], u * a + row_shift[:, None], float("-inf")))
        ds = softcap_bwd(p, u, SOFTCAP) * (dp - row_delta[:, None])
        dquery = tl.dot(ds.to(key.dtype), key, dquery, input_precision="ieee")
    mask = (head < R)[:, None] & (columns < P)[None, :]
    tl.store(
        dq_ptr + q_at[:, None] + columns[None, :],
        (dquery * grad_scale).to(dq_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, chosen_ptr, walk_ptr, blocks_ptr, dout_ptr, delta_ptr, shift_ptr, dk_ptr, dv_ptr, T,
    qk_scale, a, grad_scale,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one group. Logits are kept transposed, (N,M): P and dS then leave one product in the
    layout of the next one. walk: the indices of the `blocks` query blocks to visit."""
    R: tl.constexpr = Hq // Hkv
    batch, group, block = (tl.program_id(0) // Hkv).to(tl.int64), tl.program_id(0) % Hkv, tl.program_id(1)
    keys, columns = block * N + tl.arange(0, N), tl.arange(0, WIDTH)
    kv_at = ((batch * T + keys) * Hkv + group) * P
    key, value = (
        gather_rows(k_ptr, kv_at, columns, keys < T, P),
        gather_rows(v_ptr, kv_at, columns, keys < T, P),
    )
    dkey, dvalue = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    chosen_ptr += (batch * (T + 1) + keys)[:, None] * T
    own = batch * tl.num_programs(1) + block
    walk_ptr += own * tl.cdiv(T, M)
    for step in range(R * tl.load(blocks_ptr + own)):  # blocks and heads in one loop: one pipeline
        head = group * R + step % R
        queries = tl.load(walk_ptr + step // R) * M + tl.arange(0, M)
        q_at, row_at = ((batch * T + queries) * Hq + head) * P, (batch * Hq + head) * T + queries
        query = gather_rows(q_ptr, q_at, columns, queries < T, P)
        do = gather_rows(dout_ptr, q_at, columns, queries < T, P)
        pair = tl.load(
            chosen_ptr + queries[None, :], mask=(keys < T)[:, None] & (queries < T)[None, :], other=0
        )
        u = apply_softcap(tl.dot(key, tl.trans(query), input_precision="ieee") * qk_scale, SOFTCAP)
        dp = tl.dot(value, tl.trans(do), input_precision="ieee")
        x = u * a + tl.load(shift_ptr + row_at, mask=queries < T, other=0.0)[None, :]
        p = tl.exp2(tl.where(pair != 0, x, float("-inf")))
        dsoftcap = softcap_bwd(p, u, SOFTCAP)
        dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
        ds = dsoftcap * (dp - tl.load(delta_ptr + row_at, mask=queries < T, other=0.0)[None, :])
        dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    mask = (keys < T)[:, None] & (columns < P)[None, :]
    at = kv_at[:, None] + columns[None, :]
    tl.store(dk_ptr + at, (dkey * grad_scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + at, dvalue.to(dv_ptr.dtype.element_ty), mask=mask)


def _tiles(P: int, R: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages) of each kernel. A query has few heads: one warp holds 16 rows of a product."""
    M = max(16, triton.next_power_of_2(R))
    if dtype == torch.float32:
        return {"gather": (M, 16, 4 if P <= 64 else 8, 1), "dkdv": (16, 16, 4, 1)}
    if P <= 64:
        return {"gather": (M, 64, M // 16, 2), "dkdv": (64, 64, 4, 2)}
    return {"gather": (M, 32, M // 16, 2), "dkdv": (32, 64, 8, 2)}


def _width(P: int) -> int:
    return checked_width("dsa_attention: on CUDA the head dim", P)


def dsa_attention_fwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """q (B,T,Hq,P), k and v (B,T,Hkv,P) fp32, fp16 or bf16, indices (B,T,K) int32 -> out (B,T,Hq,P) in q.dtype, lse
    (B,Hq,T) fp32. Non-contiguous inputs are copied. Raises ValueError unless P is a power of two <= 128."""
    B, T, Hq, P = q.shape
    Hkv, K, width = k.shape[2], indices.shape[2], _width(P)
    q, k, v, indices = (t.contiguous() for t in (q, k, v, indices))
    M, N, warps, stages = _tiles(P, Hq // Hkv, q.dtype)["gather"]
    SOFTCAP, qk_scale, a, b, _ = softcap_params(scale, softcap, q.dtype)
    out, lse = q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.float32)
    _forward_kernel[(B * T * Hkv,)](
        q, k, v, indices, out, lse, T, K, qk_scale, a, b,
        Hq=Hq, Hkv=Hkv, P=P, WIDTH=width, M=M, N=N, SOFTCAP=SOFTCAP, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def dsa_attention_bwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in their shapes and dtype; bitwise deterministic. Arguments and errors as in the forward."""
    B, T, Hq, P = q.shape
    Hkv, K = k.shape[2], indices.shape[2]
    q, k, v, indices, out, lse, dout = (t.contiguous() for t in (q, k, v, indices, out, lse, dout))
    tiles, (SOFTCAP, qk_scale, a, b, grad_scale) = (
        _tiles(P, Hq // Hkv, q.dtype),
        softcap_params(scale, softcap, q.dtype),
    )
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    options = {"Hq": Hq, "Hkv": Hkv, "P": P, "WIDTH": _width(P), "SOFTCAP": SOFTCAP}
    M, N, warps, stages = tiles["gather"]
    _dq_kernel[(B * T * Hkv,)](
        q, k, v, indices, out, dout, lse, delta, shift, dq, T, K, qk_scale, a, b, grad_scale,
        **options, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dkdv"]
    chosen = by_key(indices, torch.ones_like(indices, dtype=torch.int8))
    _dkdv_kernel[B * Hkv, triton.cdiv(T, N)](
        q, k, v, chosen, *query_blocks(indices, M, N), dout, delta, shift, dk, dv, T, qk_scale, a, grad_scale,
        **options, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
