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

kernels/_triton/block_spans.py defines which blocks a program loops over, and kernels/_triton/softcap.py u, a and b of a
logit.

B batch, T tokens, H heads, C latent dim, P, R and V head dims of q.k without and with position and of the values
(WP, WR, WV: padded to 16), M query rows and N keys of a block.
Sources: DeepSeek-V2 (2024), FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.block_spans import block_spans, loop_block
from kernels._triton.constants import LN2, LOG2E, LOWEST
from kernels._triton.softcap import apply_softcap, softcap_bwd, softcap_params
from kernels._triton.tiles import apply_mask, load_tile, load_vector, store_tile
from kernels.op_support import contiguous_clone


@triton.jit
def _forward_kernel(
    q_nope_ptr, q_rope_ptr, kv_ptr, k_rope_ptr, ids_ptr, spans_ptr, out_ptr, lse_ptr, T, qk_scale, a, b,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out and lse of M rows of one head. The last rows, which loop over the most keys, are started first."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at = first_token * H + head
    rows = block * M + tl.arange(0, M)
    row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
    nope = load_tile(q_nope_ptr + at * P, block * M, H * P, T, P, M, WP, EVEN)
    rope = load_tile(q_rope_ptr + at * R, block * M, H * R, T, R, M, WR, EVEN)
    largest = tl.full((M,), LOWEST, tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WV), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = loop_block(step, begin, before, full, FULL) * N
            key = load_tile(kv_ptr + at * (P + V), start, H * (P + V), T, P, N, WP, FULL or EVEN)
            key_rope = load_tile(k_rope_ptr + first_token * R, start, R, T, R, N, WR, FULL or EVEN)
            value = load_tile(kv_ptr + at * (P + V) + P, start, H * (P + V), T, V, N, WV, FULL or EVEN)
            x = tl.dot(nope, tl.trans(key), input_precision="ieee")
            x = tl.dot(rope, tl.trans(key_rope), x, input_precision="ieee")
            x = apply_softcap(x * qk_scale, SOFTCAP) * a + b
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
                x = apply_mask(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, 0, False)
            lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
            shrink = tl.exp2(lower - largest)
            total, acc = total * shrink, acc * shrink[:, None]
            p = tl.exp2(x - largest[:, None])
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)  # rows past the end
    store_tile(out_ptr + at * V, block * M, H * V, T, V, acc / total[:, None], True)
    lse_ptr += (batch.to(tl.int64) * H + head) * T + rows
    tl.store(lse_ptr, (largest + tl.log2(total)) * LN2, mask=rows < T)


@triton.jit
def _rows_kernel(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, shift_ptr, T, b,
    H: tl.constexpr, V: tl.constexpr, WV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum_v dout * out and shift = b - lse log2e, (B,H,T) fp32: p is then exp2(u * a + shift)."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.program_id(1) * M
    base = (batch.to(tl.int64) * T * H + head) * V
    o = load_tile(out_ptr + base, start, H * V, T, V, M, WV, False).to(tl.float32)
    do = load_tile(dout_ptr + base, start, H * V, T, V, M, WV, False).to(tl.float32)
    rows = start + tl.arange(0, M)
    at = (batch.to(tl.int64) * H + head) * T + rows
    tl.store(delta_ptr + at, tl.sum(o * do, 1), mask=rows < T)
    log = tl.load(lse_ptr + at, mask=rows < T, other=0.0)
    tl.store(shift_ptr + at, b - log * LOG2E, mask=rows < T)


@triton.jit
def _dkdv_kernel(
    q_nope_ptr, q_rope_ptr, kv_ptr, k_rope_ptr, ids_ptr, spans_ptr, dout_ptr, delta_ptr, shift_ptr, dkv_ptr,
    dk_rope_ptr, T, qk_scale, a, grad_scale,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dK_nope, dr and dV of N keys of one head. Logits are kept transposed, (N,M): P and dS then leave one product
    in the layout of the next one. Registers are scarce: each vector is loaded where it is used."""
    batch, head, block = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at, row_at = first_token * H + head, (batch.to(tl.int64) * H + head) * T
    columns = block * N + tl.arange(0, N)
    column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
    key = load_tile(kv_ptr + at * (P + V), block * N, H * (P + V), T, P, N, WP, EVEN)
    key_rope = load_tile(k_rope_ptr + first_token * R, block * N, R, T, R, N, WR, EVEN)
    value = load_tile(kv_ptr + at * (P + V) + P, block * N, H * (P + V), T, V, N, WV, EVEN)
    dkey, dkey_rope = tl.zeros((N, WP), tl.float32), tl.zeros((N, WR), tl.float32)
    dvalue = tl.zeros((N, WV), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = loop_block(step, begin, before, full, FULL) * M
            rows = start + tl.arange(0, M)
            nope = load_tile(q_nope_ptr + at * P, start, H * P, T, P, M, WP, FULL or EVEN)
            rope = load_tile(q_rope_ptr + at * R, start, H * R, T, R, M, WR, FULL or EVEN)
            do = load_tile(dout_ptr + at * V, start, H * V, T, V, M, WV, FULL or EVEN)
            x = tl.dot(key, tl.trans(nope), input_precision="ieee")
            x = tl.dot(key_rope, tl.trans(rope), x, input_precision="ieee")
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")  # overlaps the exponentials
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + load_vector(shift_ptr + row_at, rows, T, FULL or EVEN)[None, :]
            if not FULL:
                row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
                x = apply_mask(x, rows, columns, row_ids, column_ids, T, True, CAUSAL, 0, False)
            p = tl.exp2(x)
            dsoftcap = softcap_bwd(p, u, SOFTCAP)
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            ds = dsoftcap * (dp - load_vector(delta_ptr + row_at, rows, T, FULL or EVEN)[None, :])
            ds = ds.to(nope.dtype)
            dkey = tl.dot(ds, nope, dkey, input_precision="ieee")
            dkey_rope = tl.dot(ds, rope, dkey_rope, input_precision="ieee")
    store_tile(dkv_ptr + at * (P + V), block * N, H * (P + V), T, P, dkey * grad_scale, True)
    store_tile(dk_rope_ptr + at * R, block * N, H * R, T, R, dkey_rope * grad_scale, True)
    store_tile(dkv_ptr + at * (P + V) + P, block * N, H * (P + V), T, V, dvalue, True)


@triton.jit
def _dq_kernel(
    q_nope_ptr, q_rope_ptr, kv_ptr, k_rope_ptr, ids_ptr, spans_ptr, dout_ptr, delta_ptr, shift_ptr,
    dq_nope_ptr, dq_rope_ptr, T, qk_scale, a, grad_scale,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    WP: tl.constexpr, WR: tl.constexpr, WV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Both parts of dQ of M rows of one head, with the key-block loop of the forward."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    at, row_at = first_token * H + head, (batch.to(tl.int64) * H + head) * T
    rows = block * M + tl.arange(0, M)
    row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
    row_shift, row_delta = (
        load_vector(shift_ptr + row_at, rows, T, EVEN),
        load_vector(delta_ptr + row_at, rows, T, EVEN),
    )
    nope = load_tile(q_nope_ptr + at * P, block * M, H * P, T, P, M, WP, EVEN)
    rope = load_tile(q_rope_ptr + at * R, block * M, H * R, T, R, M, WR, EVEN)
    do = load_tile(dout_ptr + at * V, block * M, H * V, T, V, M, WV, EVEN)
    dnope, drope = tl.zeros((M, WP), tl.float32), tl.zeros((M, WR), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = loop_block(step, begin, before, full, FULL) * N
            key = load_tile(kv_ptr + at * (P + V), start, H * (P + V), T, P, N, WP, FULL or EVEN)
            key_rope = load_tile(k_rope_ptr + first_token * R, start, R, T, R, N, WR, FULL or EVEN)
            value = load_tile(kv_ptr + at * (P + V) + P, start, H * (P + V), T, V, N, WV, FULL or EVEN)
            x = tl.dot(nope, tl.trans(key), input_precision="ieee")
            x = tl.dot(rope, tl.trans(key_rope), x, input_precision="ieee")
            dp = tl.dot(do, tl.trans(value), input_precision="ieee")
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + row_shift[:, None]
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
                x = apply_mask(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, 0, False)
            ds = softcap_bwd(tl.exp2(x), u, SOFTCAP) * (dp - row_delta[:, None])
            ds = ds.to(key.dtype)
            dnope = tl.dot(ds, key, dnope, input_precision="ieee")
            drope = tl.dot(ds, key_rope, drope, input_precision="ieee")
    store_tile(dq_nope_ptr + at * P, block * M, H * P, T, P, dnope * grad_scale, True)
    store_tile(dq_rope_ptr + at * R, block * M, H * R, T, R, drope * grad_scale, True)


def _tiles(P: int, R: int, V: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages) of each kernel. fp32 runs on the FMA units and exhausts registers much sooner."""
    if dtype == torch.float32:
        return dict.fromkeys(("forward", "dkdv", "dq"), (16, 16, 4, 1))
    if max(P, R, V) <= 64:
        return {"forward": (128, 64, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)}
    return {"forward": (128, 64, 8, 2), "dkdv": (32, 32, 8, 1), "dq": (32, 32, 8, 1)}


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
    SOFTCAP, qk_scale, a, b, _ = softcap_params(scale, softcap, q_nope.dtype)
    spans = block_spans(doc_ids, M, N, False, causal, tokens=2048, num_warps=4)
    out = q_nope.new_empty((B, T, H, widths["V"]))
    lse = q_nope.new_empty((B, H, T), dtype=torch.float32)
    _forward_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, out, lse, T, qk_scale, a, b, H=H, **widths, M=M, N=N,
        SOFTCAP=SOFTCAP, CAUSAL=causal, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
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
    SOFTCAP, qk_scale, a, b, grad_scale = softcap_params(scale, softcap, q_nope.dtype)
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    grid = (B * H, triton.cdiv(T, 64))
    _rows_kernel[grid](
        out, dout, lse, delta, shift, T, b, H=H, V=widths["V"], WV=widths["WV"], M=64, num_warps=4
    )
    with torch.autocast("cuda", enabled=False):
        W, kv = _up(c_kv, W_uk, W_uv)
    dq_nope, dq_rope = q_nope.new_empty(q_nope.shape), q_rope.new_empty(q_rope.shape)
    dkv, dk_rope = kv.new_empty(kv.shape), q_rope.new_empty(q_rope.shape)
    options = {"H": H, **widths, "SOFTCAP": SOFTCAP, "CAUSAL": causal}
    M, N, warps, stages = tiles["dkdv"]
    spans = block_spans(doc_ids, N, M, True, causal, tokens=2048, num_warps=4)
    _dkdv_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, dout, delta, shift, dkv, dk_rope, T, qk_scale, a, grad_scale,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    M, N, warps, stages = tiles["dq"]
    spans = block_spans(doc_ids, M, N, False, causal, tokens=2048, num_warps=4)
    _dq_kernel[B * H, spans.shape[1]](
        q_nope, q_rope, kv, k_rope, doc_ids, spans, dout, delta, shift, dq_nope, dq_rope, T, qk_scale, a, grad_scale,
        **options, M=M, N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    with torch.autocast("cuda", enabled=False):
        dkv = dkv.view(B * T, -1)
        dc = (dkv @ W).view(c_kv.shape)
        dW_uk, dW_uv = (dkv.T @ c_kv.flatten(0, 1)).view(H, -1, c_kv.shape[-1]).split((P, widths["V"]), 1)
    dk_rope = dk_rope.sum(2, dtype=torch.float32).to(k_rope.dtype)
    # With one head both are already contiguous: without a copy they would share one storage.
    return dq_nope, dq_rope, dc, dk_rope, contiguous_clone(dW_uk), contiguous_clone(dW_uv)
