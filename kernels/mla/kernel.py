"""mla in Triton: online softmax forward, backward recomputed from the logsumexp, blocks skipped by document.

    up          [W_uk c, W_uv c] for all tokens and heads as one matrix product (cuBLAS) into kv (B,T,H,P+Pv), before
                either direction and freed after it. The rotated key r is shared by all heads and read directly.
    forward     one program per (query block, head). Writes out and lse.
    rows        delta = sum_v dout * out, and the logsumexp in base 2, once per query row.
    dK, dV      one program per (key block, head) loops over the query blocks. [dK_nope, dV] has the layout of kv, dr
                is written per head.
    dQ          one program per (query block, head).
    down        dc and [dW_uk, dW_uv] are one matrix product each of [dK_nope, dV]; dr is summed over the heads.

Why keys and values are computed before the loop and not inside: inside, each of the T/M query blocks would recompute
them, C (P+Pv) more multiply-adds per element of the block in addition to M (P+R+Pv): 33 % more at
C = P = R = Pv = 64 and M = 128, and the tile must go through shared memory to become an operand. Before the loop, the
cost is one pass of 2 B T H (P+Pv) bytes over memory: 0.2 GB at B 4, T 4096, H 56. No atomics: bitwise deterministic.

kernel_tiles.py defines which blocks a program loops over, and u, a and b of a logit.

B batch, T tokens, H heads, C latent dim, P, R and V head dims of q.k without and with position and of the values
(WP, WR, WV: padded to 16), M query rows and N keys of a block.
Sources: DeepSeek-V2 (2024), FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mla.kernel_tiles import capped, hide, load, spans_of, store, through_cap, vector, walk_block

LOG2E = math.log2(math.e)
LARGEST_FAST_CAP = 64.0


@triton.jit
def _forward_kernel(
    q_nope, q_rope, kv, k_rope, ids, spans, out, lse, T, gain, a, b,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out and lse of M rows of one head. The last rows, which loop over the most keys, are started first."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at = first_token * H + head
    rows = block * M + tl.arange(0, M)
    row_ids = vector(ids + first_token, rows, T, EVEN)
    nope = load(q_nope + at * P, block * M, H * P, T, P, M, WP, EVEN)
    rope = load(q_rope + at * R, block * M, H * R, T, R, M, WR, EVEN)
    largest = tl.full((M,), -1e30, tl.float32)  # finite: a row with no visible key yet must not give nan
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WV), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = walk_block(step, begin, before, full, FULL) * N
            key = load(kv + at * (P + V), start, H * (P + V), T, P, N, WP, FULL or EVEN)
            key_rope = load(k_rope + first_token * R, start, R, T, R, N, WR, FULL or EVEN)
            value = load(kv + at * (P + V) + P, start, H * (P + V), T, V, N, WV, FULL or EVEN)
            x = tl.dot(nope, tl.trans(key), input_precision="ieee")
            x = tl.dot(rope, tl.trans(key_rope), x, input_precision="ieee")
            x = capped(x * gain, CAP) * a + b
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = vector(ids + first_token, columns, T, EVEN)
                x = hide(x, rows, columns, row_ids, column_ids, T, False, CAUSAL)
            lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
            shrink = tl.exp2(lower - largest)
            total, acc = total * shrink, acc * shrink[:, None]
            p = tl.exp2(x - largest[:, None])
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)  # rows past the end
    store(out + at * V, block * M, H * V, T, V, acc / total[:, None])
    lse += (batch.to(tl.int64) * H + head) * T + rows
    tl.store(lse, (largest + tl.log2(total)) * 0.6931471805599453, mask=rows < T)


@triton.jit
def _rows_kernel(
    out, dout, lse, delta, shift, T, b,
    H: tl.constexpr, V: tl.constexpr, WV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum_v dout * out and shift = b - lse log2e, (B,H,T) fp32: p is then exp2(u * a + shift)."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.program_id(1) * M
    base = (batch.to(tl.int64) * T * H + head) * V
    o = load(out + base, start, H * V, T, V, M, WV, False).to(tl.float32)
    do = load(dout + base, start, H * V, T, V, M, WV, False).to(tl.float32)
    rows = start + tl.arange(0, M)
    at = (batch.to(tl.int64) * H + head) * T + rows
    tl.store(delta + at, tl.sum(o * do, 1), mask=rows < T)
    log = tl.load(lse + at, mask=rows < T, other=0.0)
    tl.store(shift + at, b - log * 1.4426950408889634, mask=rows < T)


@triton.jit
def _dkdv_kernel(
    q_nope, q_rope, kv, k_rope, ids, spans, dout, delta, shift, dkv, dk_rope, T, gain, a, gain_out,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dK_nope, dr and dV of N keys of one head. Logits are kept transposed, (N,M): P and dS then leave one product
    in the layout of the next one. Registers are scarce: each vector is loaded where it is used."""
    batch, head, block = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at, row_at = first_token * H + head, (batch.to(tl.int64) * H + head) * T
    columns = block * N + tl.arange(0, N)
    column_ids = vector(ids + first_token, columns, T, EVEN)
    key = load(kv + at * (P + V), block * N, H * (P + V), T, P, N, WP, EVEN)
    key_rope = load(k_rope + first_token * R, block * N, R, T, R, N, WR, EVEN)
    value = load(kv + at * (P + V) + P, block * N, H * (P + V), T, V, N, WV, EVEN)
    dkey, dkey_rope = tl.zeros((N, WP), tl.float32), tl.zeros((N, WR), tl.float32)
    dvalue = tl.zeros((N, WV), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = walk_block(step, begin, before, full, FULL) * M
            rows = start + tl.arange(0, M)
            nope = load(q_nope + at * P, start, H * P, T, P, M, WP, FULL or EVEN)
            rope = load(q_rope + at * R, start, H * R, T, R, M, WR, FULL or EVEN)
            do = load(dout + at * V, start, H * V, T, V, M, WV, FULL or EVEN)
            x = tl.dot(key, tl.trans(nope), input_precision="ieee")
            x = tl.dot(key_rope, tl.trans(rope), x, input_precision="ieee")
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")  # overlaps the exponentials
            u = capped(x * gain, CAP)
            x = u * a + vector(shift + row_at, rows, T, FULL or EVEN)[None, :]
            if not FULL:
                row_ids = vector(ids + first_token, rows, T, EVEN)
                x = hide(x, rows, columns, row_ids, column_ids, T, True, CAUSAL)
            p = tl.exp2(x)
            slope = through_cap(p, u, CAP)
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            ds = slope * (dp - vector(delta + row_at, rows, T, FULL or EVEN)[None, :])
            ds = ds.to(nope.dtype)
            dkey = tl.dot(ds, nope, dkey, input_precision="ieee")
            dkey_rope = tl.dot(ds, rope, dkey_rope, input_precision="ieee")
    store(dkv + at * (P + V), block * N, H * (P + V), T, P, dkey * gain_out)
    store(dk_rope + at * R, block * N, H * R, T, R, dkey_rope * gain_out)
    store(dkv + at * (P + V) + P, block * N, H * (P + V), T, V, dvalue)


@triton.jit
def _dq_kernel(
    q_nope, q_rope, kv, k_rope, ids, spans, dout, delta, shift, dq_nope, dq_rope, T, gain, a, gain_out,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Both parts of dQ of M rows of one head, with the key-block loop of the forward."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at, row_at = first_token * H + head, (batch.to(tl.int64) * H + head) * T
    rows = block * M + tl.arange(0, M)
    row_ids = vector(ids + first_token, rows, T, EVEN)
    row_shift, row_delta = vector(shift + row_at, rows, T, EVEN), vector(delta + row_at, rows, T, EVEN)
    nope = load(q_nope + at * P, block * M, H * P, T, P, M, WP, EVEN)
    rope = load(q_rope + at * R, block * M, H * R, T, R, M, WR, EVEN)
    do = load(dout + at * V, block * M, H * V, T, V, M, WV, EVEN)
    dnope, drope = tl.zeros((M, WP), tl.float32), tl.zeros((M, WR), tl.float32)
    span = spans + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = walk_block(step, begin, before, full, FULL) * N
            key = load(kv + at * (P + V), start, H * (P + V), T, P, N, WP, FULL or EVEN)
            key_rope = load(k_rope + first_token * R, start, R, T, R, N, WR, FULL or EVEN)
            value = load(kv + at * (P + V) + P, start, H * (P + V), T, V, N, WV, FULL or EVEN)
            x = tl.dot(nope, tl.trans(key), input_precision="ieee")
            x = tl.dot(rope, tl.trans(key_rope), x, input_precision="ieee")
            dp = tl.dot(do, tl.trans(value), input_precision="ieee")
            u = capped(x * gain, CAP)
            x = u * a + row_shift[:, None]
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = vector(ids + first_token, columns, T, EVEN)
                x = hide(x, rows, columns, row_ids, column_ids, T, False, CAUSAL)
            ds = through_cap(tl.exp2(x), u, CAP) * (dp - row_delta[:, None])
            ds = ds.to(key.dtype)
            dnope = tl.dot(ds, key, dnope, input_precision="ieee")
            drope = tl.dot(ds, key_rope, drope, input_precision="ieee")
    store(dq_nope + at * P, block * M, H * P, T, P, dnope * gain_out)
    store(dq_rope + at * R, block * M, H * R, T, R, drope * gain_out)


def _tiles(P: int, R: int, V: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages) of each kernel. fp32 runs on the FMA units and exhausts registers much sooner."""
    if dtype == torch.float32:
        return dict.fromkeys(("forward", "dkdv", "dq"), (16, 16, 4, 1))
    if max(P, R, V) <= 64:
        return {"forward": (128, 64, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)}
    return {"forward": (128, 64, 8, 2), "dkdv": (32, 32, 8, 1), "dq": (32, 32, 8, 1)}


def _logit(scale: float, softcap: float, dtype: torch.dtype) -> tuple[str, float, float, float, float]:
    """CAP, gain, a, b of kernel_tiles.py's table, and the factor that scales the backward sums to gradients."""
    if softcap == 0:
        return "none", 1.0, scale * LOG2E, 0.0, scale
    a = softcap * LOG2E
    if dtype == torch.float32 or softcap > LARGEST_FAST_CAP:
        return "exact", scale / softcap, a, 0.0, scale
    return "fast", 2 * LOG2E * scale / softcap, -2 * a, a, 4 * scale


def _widths(P: int, R: int, V: int) -> dict[str, int]:
    """Head dims and their tile widths: a matrix product is at least 16 wide."""
    if any(n & (n - 1) or not 1 <= n <= 128 for n in (P, R, V)):
        raise ValueError(f"mla: on CUDA the head dims must be powers of two up to 128, not {P}, {R} and {V}")
    return {"P": P, "R": R, "V": V, "WP": max(P, 16), "WR": max(R, 16), "WV": max(V, 16)}


def _up(c_kv: Tensor, W_uk: Tensor, W_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (H (P+V), C), the two matrices of each head stacked, and kv = c W^T (B,T,H,P+V)."""
    H = W_uk.shape[0]
    W = torch.cat((W_uk, W_uv), 1).flatten(0, 1)
    return W, (c_kv.flatten(0, 1) @ W.T).view(*c_kv.shape[:2], H, -1)


def mla_fwd_kernel(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q_nope (B,T,H,P), q_rope (B,T,H,R), c_kv (B,T,C), k_rope (B,T,R), W_uk (H,P,C), W_uv (H,V,C) in fp32, fp16 or
    bf16, doc_ids (B,T) int32 -> out (B,T,H,V) in that dtype, lse (B,H,T) fp32. Inputs that are not contiguous are
    copied. Raises ValueError unless P, R and V are powers of two <= 128."""
    B, T, H, P = q_nope.shape
    widths = _widths(P, q_rope.shape[-1], W_uv.shape[1])
    q_nope, q_rope, k_rope, doc_ids = (t.contiguous() for t in (q_nope, q_rope, k_rope, doc_ids))
    with torch.autocast("cuda", enabled=False):  # autocast would run the product of fp32 inputs in bf16
        _, kv = _up(c_kv, W_uk, W_uv)
    M, N, warps, stages = _tiles(P, widths["R"], widths["V"], q_nope.dtype)["forward"]
    CAP, gain, a, b, _ = _logit(scale, softcap, q_nope.dtype)
    spans = spans_of(doc_ids, M, N, False, causal)
    out = q_nope.new_empty((B, T, H, widths["V"]))
    lse = q_nope.new_empty((B, H, T), dtype=torch.float32)
    _forward_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, out, lse, T, gain, a, b, H=H, **widths, M=M, N=N,
        CAP=CAP, CAUSAL=causal, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def mla_bwd_kernel(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, W_uk: Tensor, W_uv: Tensor, doc_ids: Tensor,
    out: Tensor, lse: Tensor, dout: Tensor, scale: float, softcap: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the six floating-point inputs in their shapes and dtype. Arguments and errors as in the forward."""
    B, T, H, P = q_nope.shape
    widths = _widths(P, q_rope.shape[-1], W_uv.shape[1])
    q_nope, q_rope, c_kv, k_rope, doc_ids, out, lse, dout = (
        t.contiguous() for t in (q_nope, q_rope, c_kv, k_rope, doc_ids, out, lse, dout)
    )
    tiles = _tiles(P, widths["R"], widths["V"], q_nope.dtype)
    CAP, gain, a, b, gain_out = _logit(scale, softcap, q_nope.dtype)
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    grid = (B * H, triton.cdiv(T, 64))
    _rows_kernel[grid](
        out, dout, lse, delta, shift, T, b, H=H, V=widths["V"], WV=widths["WV"], M=64, num_warps=4
    )
    with torch.autocast("cuda", enabled=False):
        W, kv = _up(c_kv, W_uk, W_uv)
    dq_nope, dq_rope = q_nope.new_empty(q_nope.shape), q_rope.new_empty(q_rope.shape)
    dkv, dk_rope = kv.new_empty(kv.shape), q_rope.new_empty(q_rope.shape)
    options = {"H": H, **widths, "CAP": CAP, "CAUSAL": causal}
    M, N, warps, stages = tiles["dkdv"]
    spans = spans_of(doc_ids, N, M, True, causal)
    _dkdv_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, dout, delta, shift, dkv, dk_rope, T, gain, a, gain_out,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dq"]
    spans = spans_of(doc_ids, M, N, False, causal)
    _dq_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, dout, delta, shift, dq_nope, dq_rope, T, gain, a, gain_out,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    with torch.autocast("cuda", enabled=False):
        dkv = dkv.view(B * T, -1)
        dc = (dkv @ W).view(c_kv.shape)
        dW_uk, dW_uv = (dkv.T @ c_kv.flatten(0, 1)).view(H, -1, c_kv.shape[-1]).split((P, widths["V"]), 1)
    dk_rope = dk_rope.sum(2, dtype=torch.float32).to(k_rope.dtype)
    return dq_nope, dq_rope, dc, dk_rope, dW_uk.contiguous(), dW_uv.contiguous()
