"""The indexer's loss in Triton: index scores of the chosen keys with their gradient, and the target distribution.

    scores      one program per query: its J heads are the rows of a tile, its K keys are read N at a time. Nothing of
                size J K per query is written; passes over such tensors took most of the layer's time in eager torch.
    dQ, dW      the same loop: G = w dS where q.k > 0, then G k, and the sums of dS relu(q.k).
    dK          one program per (key block, H of the heads). It loops over the query blocks that chose any of its keys;
                dS is stored key-major, (B,T,T) fp32, 0 where not chosen. Sums are in registers, then over the J / H
                parts: bitwise deterministic.
    target      one program per (query, key/value head): the logsumexp over its keys, then their weights, summed over
                the R query heads. Writes (B,T,Hkv,K) fp32.

dS is first divided by its largest magnitude, and the gradients are multiplied by it: G is a factor of products in the
inputs' dtype, and a mean over B T queries would underflow to 0 in fp16.

B batch, T tokens, J index heads, P head dim (WIDTH: padded to 16), K chosen keys per query, Hq and Hkv heads,
R = Hq / Hkv, M rows and N keys of a tile. Source: DeepSeek-V3.2-Exp (2025), the loss of the sparse stage.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.constants import LOWEST
from kernels._triton.softcap import apply_softcap, softcap_params
from kernels.dsa_indexer.kernel_tiles import by_key, checked_width, gather_rows, query_blocks

HEADS = 8  # per dK program: at B 2 and T 4096, key blocks alone give only one program per SM


@triton.jit
def _chosen_scores_kernel(
    q_ptr, k_ptr, weights_ptr, indices_ptr, scores_ptr, T, K,
    J: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scores of one query's keys; 0 where there is none."""
    batch = (tl.program_id(0) // T).to(tl.int64)  # 32-bit division: a 64-bit one is a function call
    token = tl.program_id(0).to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    query = gather_rows(q_ptr, (token * J + head) * P, columns, head < J, P)
    weight = tl.load(weights_ptr + token * J + head, mask=head < J, other=0.0).to(tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices_ptr + token * K + place, mask=place < K, other=-1)
        key = gather_rows(k_ptr, (batch * T + index) * P, columns, index >= 0, P)
        dots = tl.maximum(tl.dot(query, tl.trans(key), input_precision="ieee"), 0.0)
        tl.store(scores_ptr + token * K + place, tl.sum(weight[:, None] * dots, 0), mask=place < K)


@triton.jit
def _dq_dw_kernel(
    q_ptr, k_ptr, weights_ptr, indices_ptr, dscores_ptr, unit_ptr, dq_ptr, dweights_ptr, T, K,
    J: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ and dW of one query, with the key loop of the scores."""
    batch = (tl.program_id(0) // T).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    query = gather_rows(q_ptr, (token * J + head) * P, columns, head < J, P)
    weight = tl.load(weights_ptr + token * J + head, mask=head < J, other=0.0).to(tl.float32)
    dquery, dweight = tl.zeros((M, WIDTH), tl.float32), tl.zeros((M,), tl.float32)
    for start in range(0, K, N):
        place = start + tl.arange(0, N)
        index = tl.load(indices_ptr + token * K + place, mask=place < K, other=-1)
        key = gather_rows(k_ptr, (batch * T + index) * P, columns, index >= 0, P)
        dscore = tl.load(dscores_ptr + token * K + place, mask=index >= 0, other=0.0)
        dots = tl.dot(query, tl.trans(key), input_precision="ieee")
        dweight += tl.sum(tl.maximum(dots, 0.0) * dscore[None, :], 1)
        grad = tl.where(dots > 0, weight[:, None] * dscore[None, :], 0.0)
        dquery = tl.dot(grad.to(key.dtype), key, dquery, input_precision="ieee")
    size = tl.load(unit_ptr)
    at = ((token * J + head) * P)[:, None] + columns[None, :]
    tl.store(
        dq_ptr + at,
        (dquery * size).to(dq_ptr.dtype.element_ty),
        mask=(head < J)[:, None] & (columns < P)[None, :],
    )
    tl.store(
        dweights_ptr + token * J + head, (dweight * size).to(dweights_ptr.dtype.element_ty), mask=head < J
    )


@triton.jit
def _dk_kernel(
    q_ptr, k_ptr, weights_ptr, dscores_ptr, walk_ptr, blocks_ptr, dk_ptr, T,
    J: tl.constexpr, H: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Contribution of H heads to dK of N keys. walk: the indices of the `blocks` query blocks to visit."""
    batch, block, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys, columns = block * N + tl.arange(0, N), tl.arange(0, WIDTH)
    key = gather_rows(k_ptr, (batch * T + keys) * P, columns, keys < T, P)
    dkey = tl.zeros((N, WIDTH), tl.float32)
    dscores_ptr += (batch * (T + 1) + keys)[:, None] * T
    own = batch * tl.num_programs(1) + block
    walk_ptr += own * tl.cdiv(T, M)
    for step in range(H * tl.load(blocks_ptr + own)):  # blocks and heads in one loop: one pipeline
        head = part * H + step % H
        queries = tl.load(walk_ptr + step // H) * M + tl.arange(0, M)
        at = (batch * T + queries) * J + head
        query = gather_rows(q_ptr, at * P, columns, (queries < T) & (head < J), P)
        weight = tl.load(weights_ptr + at, mask=(queries < T) & (head < J), other=0.0).to(tl.float32)
        dscore = tl.load(
            dscores_ptr + queries[None, :], mask=(keys < T)[:, None] & (queries < T)[None, :], other=0.0
        )
        dots = tl.dot(key, tl.trans(query), input_precision="ieee")
        grad = tl.where(dots > 0, dscore * weight[None, :], 0.0)
        dkey = tl.dot(grad.to(query.dtype), query, dkey, input_precision="ieee")
    at = (((part * tl.num_programs(0) + batch) * T + keys) * P)[:, None] + columns[None, :]
    tl.store(dk_ptr + at, dkey, mask=(keys < T)[:, None] & (columns < P)[None, :])


@triton.jit
def _target_kernel(
    q_ptr, k_ptr, indices_ptr, target_ptr, T, K, qk_scale, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The attention weights of one query's keys, summed over the R heads of one group."""
    R: tl.constexpr = Hq // Hkv
    token, group = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv
    batch, token = (token // T).to(tl.int64), token.to(tl.int64)
    columns, head = tl.arange(0, WIDTH), tl.arange(0, M)
    query = gather_rows(q_ptr, (token * Hq + group * R + head) * P, columns, head < R, P)
    largest = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    for start in range(0, K, N):
        x = _logits(
            query, k_ptr, indices_ptr + token * K, start, batch * T, group, columns, K, qk_scale, a, b, Hkv,
            P, N, SOFTCAP,
        )  # fmt: skip
        lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2(lower - largest) + tl.sum(tl.exp2(x - largest[:, None]), 1)
    share = tl.where((head < R) & (total > 0), 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    for start in range(0, K, N):
        x = _logits(
            query, k_ptr, indices_ptr + token * K, start, batch * T, group, columns, K, qk_scale, a, b, Hkv,
            P, N, SOFTCAP,
        )  # fmt: skip
        place = start + tl.arange(0, N)
        p = tl.sum(tl.exp2(x - largest[:, None]) * share[:, None], 0)
        tl.store(target_ptr + (token * Hkv + group) * K + place, p, mask=place < K)


@triton.jit
def _logits(
    query, k_ptr, indices_ptr, start, first, group, columns, K, qk_scale, a, b,
    Hkv: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of N of a query's keys; -inf where there is none. first: index of the row's first token."""
    place = start + tl.arange(0, N)
    index = tl.load(indices_ptr + place, mask=place < K, other=-1)
    key = gather_rows(k_ptr, ((first + index) * Hkv + group) * P, columns, index >= 0, P)
    x = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee") * qk_scale, SOFTCAP) * a + b
    return tl.where((index >= 0)[None, :], x, float("-inf"))


def _tiles(heads: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages). A query has few heads: one warp holds 16 rows of a product."""
    M = max(16, triton.next_power_of_2(heads))
    if dtype == torch.float32:
        return {"gather": (M, 16, 4, 1), "dk": (16, 16, 4, 1)}
    return {"gather": (M, 64, max(M // 16, 2), 2), "dk": (64, 64, 4, 2)}


def dsa_chosen_scores_fwd_kernel(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """q (B,T,J,P) and k (B,T,P) fp32, fp16 or bf16, weights (B,T,J), indices (B,T,K) int32 -> (B,T,K) fp32, 0 for -1.
    Non-contiguous inputs are copied. Raises ValueError unless P is a power of two <= 128."""
    B, T, J, P = q.shape
    K, width = indices.shape[2], _width(P)
    q, k, weights, indices = (t.contiguous() for t in (q, k, weights, indices))
    M, N, warps, stages = _tiles(J, q.dtype)["gather"]
    scores = q.new_empty((B, T, K), dtype=torch.float32)
    _chosen_scores_kernel[(B * T,)](
        q, k, weights, indices, scores, T, K,
        J=J, P=P, WIDTH=width, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return scores


def dsa_chosen_scores_bwd_kernel(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and weights in their shapes and dtypes from dscores (B,T,K); bitwise deterministic. Arguments
    and errors as in the forward."""
    B, T, J, P = q.shape
    K, sizes = indices.shape[2], {"J": J, "P": P, "WIDTH": _width(P)}
    q, k, weights, indices = (t.contiguous() for t in (q, k, weights, indices))
    dscores = dscores.float()
    unit = dscores.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    dscores = (dscores / unit).contiguous()
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    tiles = _tiles(J, q.dtype)
    M, N, warps, stages = tiles["gather"]
    _dq_dw_kernel[(B * T,)](
        q, k, weights, indices, dscores, unit, dq, dweights, T, K,
        **sizes, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dk"]
    parts = triton.cdiv(J, HEADS)
    dk = k.new_empty((parts, *k.shape), dtype=torch.float32)
    _dk_kernel[B, triton.cdiv(T, N), parts](
        q, k, weights, by_key(indices, dscores), *query_blocks(indices, M, N), dk, T,
        **sizes, H=HEADS, M=M, N=N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, (dk.sum(0) * unit).to(k.dtype), dweights


def dsa_distribution_fwd_kernel(
    q: Tensor, k: Tensor, indices: Tensor, scale: float, softcap: float
) -> Tensor:
    """q (B,T,Hq,P) and k (B,T,Hkv,P) fp32, fp16 or bf16, indices (B,T,K) int32 -> (B,T,K) fp32, 0 for -1. Inputs that
    are not contiguous are copied. Raises ValueError unless P is a power of two <= 128."""
    B, T, Hq, P = q.shape
    Hkv, K, width = k.shape[2], indices.shape[2], checked_width("dsa_distribution: on CUDA the head dim", P)
    q, k, indices = (t.contiguous() for t in (q, k, indices))
    M, N, warps, stages = _tiles(Hq // Hkv, q.dtype)["gather"]
    target = q.new_empty((B, T, Hkv, K), dtype=torch.float32)
    # The target stays in fp32: the error of the "fast" softcap is 9 times the rounding of fp32.
    SOFTCAP, qk_scale, a, b, _ = softcap_params(scale, softcap, target.dtype)
    _target_kernel[(B * T * Hkv,)](
        q, k, indices, target, T, K, qk_scale, a, b,
        Hq=Hq, Hkv=Hkv, P=P, WIDTH=width, M=M, N=N, SOFTCAP=SOFTCAP, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return target.sum(2) / Hq


def _width(P: int) -> int:
    return checked_width("dsa_indexer_loss: on CUDA the index head dim", P)
