"""Key selection of dsa_indexer in Triton: a tile of index scores, then the exact top K of each row.

    scores      one program per (query block, key block) accumulates the heads one by one in one fp32 tile. A tile
                without visible pairs skips the heads. Writes (B,T,T) fp32, -inf where masked.
    choice      one program per query, with its row of scores in registers. The bits of a float, with the order of
                negative ones reversed, compare like integers, so the K-th best is found bit by bit: 32 counts, no
                sort. Scores equal to it fill the K from the first on. A running count gives each chosen key its
                index, in ascending order. torch.topk does not define the order of ties, and would write more.

Bytes: the scores written and read once, 8 B T^2. J P multiply-adds per pair, half of them skipped as future.

B batch, T tokens, J index heads, P index head dim (WIDTH: padded to 16), K chosen keys, M queries and N keys of a
block. Source: DeepSeek-V3.2-Exp (2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dsa_indexer.kernel_tiles import checked_width

LONGEST = 16384


@triton.jit
def _score_kernel(
    q_ptr, k_ptr, weights_ptr, ids_ptr, scores_ptr, T,
    J: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Index scores of M queries and N keys."""
    first_token = tl.program_id(2).to(tl.int64) * T
    rows = tl.program_id(1) * M + tl.arange(0, M)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    dims = tl.arange(0, WIDTH)
    # Past the end, use the last token: its id does not widen the range.
    row_ids = tl.load(ids_ptr + first_token + tl.minimum(rows, T - 1))
    column_ids = tl.load(ids_ptr + first_token + tl.minimum(columns, T - 1))
    meet = (tl.min(row_ids, 0) <= tl.max(column_ids, 0)) & (tl.max(row_ids, 0) >= tl.min(column_ids, 0))
    meet = meet & (tl.program_id(0) * N < tl.program_id(1) * M + M)
    at = (first_token + columns)[None, :] * P + dims[:, None]
    key = tl.load(k_ptr + at, mask=(columns < T)[None, :] & (dims < P)[:, None], other=0.0)
    total = tl.zeros((M, N), tl.float32)
    row_at = (first_token + rows) * J
    for head in range(tl.where(meet, J, 0)):
        mask = (rows < T)[:, None] & (dims < P)[None, :]
        query = tl.load(q_ptr + (row_at + head)[:, None] * P + dims[None, :], mask=mask, other=0.0)
        weight = tl.load(weights_ptr + row_at + head, mask=rows < T, other=0.0).to(tl.float32)
        total += weight[:, None] * tl.maximum(tl.dot(query, key, input_precision="ieee"), 0.0)
    seen = (row_ids[:, None] == column_ids[None, :]) & (columns[None, :] <= rows[:, None])
    at = (first_token + rows)[:, None] * T + columns[None, :]
    tl.store(
        scores_ptr + at,
        tl.where(seen, total, float("-inf")),
        mask=(rows[:, None] < T) & (columns[None, :] < T),
    )


@triton.jit
def _choice_kernel(scores_ptr, indices_ptr, T, K, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """indices of one query. WIDTH and PLACES: T and K rounded up to a power of two."""
    query = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, WIDTH)
    score = tl.load(scores_ptr + query * T + key, mask=key < T, other=float("-inf"))
    valid = score > float("-inf")
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # The largest value that at least K ranks reach; the minimum if there are fewer than K.
    reached = tl.where(tl.sum((rank >= 0).to(tl.int32), 0) >= K, 0, -2147483648)
    for i in range(31):
        higher = reached + (1 << (30 - i))
        reached = tl.where(tl.sum((rank >= higher).to(tl.int32), 0) >= K, higher, reached)
    better = valid & (rank > reached)
    equal = valid & (rank == reached)
    missing = K - tl.sum(better.to(tl.int32), 0)
    taken = better | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(indices_ptr + query * K + place, key, mask=taken)
    places = tl.arange(0, PLACES)
    free = (places >= tl.sum(taken.to(tl.int32), 0)) & (places < K)
    tl.store(indices_ptr + query * K + places, tl.full((PLACES,), -1, tl.int32), mask=free)


def dsa_scores_kernel(q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor) -> Tensor:
    """q (B,T,J,P) and k (B,T,P) fp32, fp16 or bf16, weights (B,T,J), doc_ids (B,T) int32 -> (B,T,T) fp32, -inf where
    the query (second axis) may not see the key. Raises ValueError unless P is a power of two <= 128."""
    B, T, J, P = q.shape
    width = checked_width("dsa_indexer: on CUDA the index head dim", P)
    q, k, weights, doc_ids = (t.contiguous() for t in (q, k, weights, doc_ids))
    M, N, warps = (32, 32, 4) if q.dtype == torch.float32 else (128, 128, 8)
    scores = q.new_empty((B, T, T), dtype=torch.float32)
    _score_kernel[triton.cdiv(T, N), triton.cdiv(T, M), B](
        q, k, weights, doc_ids, scores, T,
        J=J, P=P, WIDTH=width, M=M, N=N, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return scores


def dsa_choice_kernel(scores: Tensor, top_k: int) -> Tensor:
    """scores (B,T,T) fp32, -inf if masked -> (B,T,top_k) int32: the best keys (ties: the earlier one), ascending,
    then -1. Raises ValueError on T above LONGEST, the limit of one program."""
    B, T, _ = scores.shape
    if T > LONGEST:
        raise ValueError(f"dsa_indexer: on CUDA at most {LONGEST} tokens, not {T}")
    width = triton.next_power_of_2(T)
    indices = scores.new_empty((B, T, top_k), dtype=torch.int32)
    _choice_kernel[(B * T,)](
        scores, indices, T, top_k,
        WIDTH=width, PLACES=triton.next_power_of_2(top_k), num_warps=min(max(width // 1024, 1), 32),
    )  # fmt: skip
    return indices


def dsa_indexer_fwd_kernel(q: Tensor, k: Tensor, weights: Tensor, doc_ids: Tensor, top_k: int) -> Tensor:
    """Run both kernels; arguments and errors as there -> indices (B,T,top_k) int32."""
    return dsa_choice_kernel(dsa_scores_kernel(q, k, weights, doc_ids), top_k)
