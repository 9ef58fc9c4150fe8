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

from kernels.dsa_indexer.kernel_choice import dsa_indexer_fwd_kernel
from kernels.dsa_indexer.kernel_loss import (
    dsa_chosen_scores_bwd_kernel,
    dsa_chosen_scores_fwd_kernel,
    dsa_distribution_fwd_kernel,
)
from kernels.dsa_indexer.kernel_tiles import by_key, capped, checked_width, logit, rows, walks

__all__ = [
    "dsa_attention_bwd_kernel",
    "dsa_attention_fwd_kernel",
    "dsa_chosen_scores_bwd_kernel",
    "dsa_chosen_scores_fwd_kernel",
    "dsa_distribution_fwd_kernel",
    "dsa_indexer_fwd_kernel",
]


@triton.jit
def _through_cap(grad, u, CAP: tl.constexpr):
    """grad times the derivative of the softcap, without the constant factor, which is in `gain_out`."""
    if CAP == "none":
        return grad
    return grad * ((u if CAP == "fast" else 1.0) - u * u)


@triton.jit
def _forward_kernel(
    q, k, v, indices, out, lse, T, K, gain, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """out and lse of one query and the R heads of one group. Groups are adjacent: they read the same tokens."""
    R: tl.constexpr = Hq // Hkv
    token, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    batch, within = (token // T).to(tl.int64), token % T  # 32-bit division: a 64-bit one is a function call
    token = token.to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    q_at = (token * Hq + group * R + head) * P
    query = rows(q, q_at, columns, head < R, P)
    largest = tl.full((M,), -1e30, tl.float32)  # finite: a query without keys must not give nan
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WIDTH), tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices + token * K + place, mask=place < K, other=-1)
        at = ((batch * T + index) * Hkv + group) * P
        key, value = rows(k, at, columns, index >= 0, P), rows(v, at, columns, index >= 0, P)
        x = capped(tl.dot(query, tl.trans(key), input_precision="ieee") * gain, CAP) * a + b
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
        out + q_at[:, None] + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask
    )
    at = (batch * Hq + group * R + head) * T + within
    log = tl.where(some, (largest + tl.log2(total)) * 0.6931471805599453, 0.0)
    tl.store(lse + at, log, mask=head < R)


@triton.jit
def _dq_kernel(
    q, k, v, indices, out, dout, lse, delta, shift, dq, T, K, gain, a, b, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """dQ, delta and shift = b - lse log2e of one query and group, with the key loop of the forward."""
    R: tl.constexpr = Hq // Hkv
    token, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    batch, within = (token // T).to(tl.int64), token % T  # 32-bit division: a 64-bit one is a function call
    token = token.to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    q_at = (token * Hq + group * R + head) * P
    row_at = (batch * Hq + group * R + head) * T + within
    query, do = rows(q, q_at, columns, head < R, P), rows(dout, q_at, columns, head < R, P)
    o = rows(out, q_at, columns, head < R, P)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_shift = b - tl.load(lse + row_at, mask=head < R, other=0.0) * 1.4426950408889634
    tl.store(delta + row_at, row_delta, mask=head < R)
    tl.store(shift + row_at, row_shift, mask=head < R)
    dquery = tl.zeros((M, WIDTH), tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices + token * K + place, mask=place < K, other=-1)
        at = ((batch * T + index) * Hkv + group) * P
        key, value = rows(k, at, columns, index >= 0, P), rows(v, at, columns, index >= 0, P)
        u = capped(tl.dot(query, tl.trans(key), input_precision="ieee") * gain, CAP)
        dp = tl.dot(do, tl.trans(value), input_precision="ieee")
        p = tl.exp2(tl.where((index >= 0)[None, :], u * a + row_shift[:, None], float("-inf")))
        ds = _through_cap(p, u, CAP) * (dp - row_delta[:, None])
        dquery = tl.dot(ds.to(key.dtype), key, dquery, input_precision="ieee")
    mask = (head < R)[:, None] & (columns < P)[None, :]
    tl.store(dq + q_at[:, None] + columns[None, :], (dquery * gain_out).to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _dkdv_kernel(
    q, k, v, chosen, walk, blocks, dout, delta, shift, dk, dv, T, gain, a, gain_out,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one group. Logits are kept transposed, (N,M): P and dS then leave one product in the
    layout of the next one. walk: the indices of the `blocks` query blocks to visit."""
    R: tl.constexpr = Hq // Hkv
    batch, group, block = (tl.program_id(0) // Hkv).to(tl.int64), tl.program_id(0) % Hkv, tl.program_id(1)
    keys, columns = block * N + tl.arange(0, N), tl.arange(0, WIDTH)
    kv_at = ((batch * T + keys) * Hkv + group) * P
    key, value = rows(k, kv_at, columns, keys < T, P), rows(v, kv_at, columns, keys < T, P)
    dkey, dvalue = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    chosen += (batch * (T + 1) + keys)[:, None] * T
    own = batch * tl.num_programs(1) + block
    walk += own * tl.cdiv(T, M)
    for step in range(R * tl.load(blocks + own)):  # blocks and heads in one loop: one pipeline
        head = group * R + step % R
        queries = tl.load(walk + step // R) * M + tl.arange(0, M)
        q_at, row_at = ((batch * T + queries) * Hq + head) * P, (batch * Hq + head) * T + queries
        query = rows(q, q_at, columns, queries < T, P)
        do = rows(dout, q_at, columns, queries < T, P)
        pair = tl.load(chosen + queries[None, :], mask=(keys < T)[:, None] & (queries < T)[None, :], other=0)
        u = capped(tl.dot(key, tl.trans(query), input_precision="ieee") * gain, CAP)
        dp = tl.dot(value, tl.trans(do), input_precision="ieee")
        x = u * a + tl.load(shift + row_at, mask=queries < T, other=0.0)[None, :]
        p = tl.exp2(tl.where(pair != 0, x, float("-inf")))
        slope = _through_cap(p, u, CAP)
        dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
        ds = slope * (dp - tl.load(delta + row_at, mask=queries < T, other=0.0)[None, :])
        dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    mask = (keys < T)[:, None] & (columns < P)[None, :]
    at = kv_at[:, None] + columns[None, :]
    tl.store(dk + at, (dkey * gain_out).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, dvalue.to(dv.dtype.element_ty), mask=mask)


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
    CAP, gain, a, b, _ = logit(scale, softcap, q.dtype)
    out, lse = q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.float32)
    _forward_kernel[(B * T * Hkv,)](
        q, k, v, indices, out, lse, T, K, gain, a, b,
        Hq=Hq, Hkv=Hkv, P=P, WIDTH=width, M=M, N=N, CAP=CAP, num_warps=warps, num_stages=stages,
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
    tiles, (CAP, gain, a, b, gain_out) = _tiles(P, Hq // Hkv, q.dtype), logit(scale, softcap, q.dtype)
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    options = {"Hq": Hq, "Hkv": Hkv, "P": P, "WIDTH": _width(P), "CAP": CAP}
    M, N, warps, stages = tiles["gather"]
    _dq_kernel[(B * T * Hkv,)](
        q, k, v, indices, out, dout, lse, delta, shift, dq, T, K, gain, a, b, gain_out,
        **options, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dkdv"]
    chosen = by_key(indices, torch.ones_like(indices, dtype=torch.int8))
    _dkdv_kernel[B * Hkv, triton.cdiv(T, N)](
        q, k, v, chosen, *walks(indices, M, N), dout, delta, shift, dk, dv, T, gain, a, gain_out,
        **options, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
