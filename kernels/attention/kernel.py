"""attention in Triton: online softmax forward, backward recomputed from the logsumexp, blocks skipped by document.

    forward     one program per (query block, query head). Q, the output and the row sums stay in registers;
                K and V blocks are streamed. Writes out and lse.
    rows        delta = sum_p dout * out, and the logsumexp in base 2, once per query row.
    dK, dV      one program per (key block, key/value head): it loops over the query blocks of its R query heads,
                so that a group's sum stays in registers. No atomics: bitwise deterministic.
    dQ          one program per (query block, query head). Both recompute S and P: 7 matrix products instead of
                the minimum of 5 are the cost of a fixed summation order.

kernels/_triton/block_spans.py defines which blocks a program loops over, and kernels/_triton/softcap.py the base-2
form u * a + b of a logit. For a softcap c <= 32 the maximum of the masked blocks (with the diagonal) also serves for
the full blocks: other logits are at most 2c above it, and e^64 can be summed in fp32 and stored in bf16, though not
in fp16.
On compute capability 9.0 with triton 3.9 or later, hopper.py has faster kernels for P 64 and 128: see `_hopper`.
Limited by the matrix products and by 3 special-function results per element (1 without softcap; 16 per cycle per
SM). Bytes: Q, out and dout once; K and V once per query block, Q and dout once per key block, mostly from L2.

B batch, T tokens, Hq query heads, Hkv key/value heads, R = Hq / Hkv, P head dim (WIDTH: padded to 16), M query
rows and N keys of a block. Sources: FlashAttention-2 (Dao 2023), softcap (Gemma 2, 2024).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.block_spans import block_spans, loop_block
from kernels._triton.constants import LN2, LOG2E, LOWEST
from kernels._triton.hopper import has_hopper_gluon
from kernels._triton.softcap import apply_softcap, softcap_bwd, softcap_params
from kernels._triton.tiles import apply_mask, load_tile, load_vector, store_tile

LARGEST_FIXED_CAP = 32.0


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, ids_ptr, spans_ptr, out_ptr, lse_ptr, T, qk_scale, a, b,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, ONLINE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out and lse of M rows of one head. The last rows, which loop over the most keys, are started first."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head, kv_head = (first_token * Hq + head) * P, (first_token * Hkv + head // (Hq // Hkv)) * P
    rows = block * M + tl.arange(0, M)
    row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
    query = load_tile(q_ptr + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    largest = tl.full((M,), LOWEST, tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, WIDTH), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        if FULL and not ONLINE:
            # The maximum is now fixed; if no block was masked, any value of the logits' magnitude works.
            largest = tl.where(largest > -1e29, largest, 0.0)
        for step in range(full if FULL else masked):
            start = loop_block(step, begin, before, full, FULL) * N
            key = load_tile(k_ptr + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            value = load_tile(v_ptr + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            u = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee") * qk_scale, SOFTCAP)
            if FULL and not ONLINE:
                p = tl.exp2(u * a + (b - largest)[:, None])
            else:
                x = u * a + b
                if not FULL:
                    columns = start + tl.arange(0, N)
                    column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
                    x = apply_mask(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, WINDOW, EVEN)
                lower, largest = largest, tl.maximum(largest, tl.max(x, 1))
                shrink = tl.exp2(lower - largest)
                total, acc = total * shrink, acc * shrink[:, None]
                p = tl.exp2(x - largest[:, None])
            total += tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)  # rows past the end
    store_tile(out_ptr + q_head, block * M, Hq * P, T, P, acc / total[:, None], False)
    at = lse_ptr + (batch.to(tl.int64) * Hq + head) * T + rows
    tl.store(at, (largest + tl.log2(total)) * LN2, mask=rows < T)


@triton.jit
def _rows_kernel(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, shift_ptr, T, b,
    Hq: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum_p dout * out and shift = b - lse log2e, (B,Hq,T) fp32: p is then exp2(u * a + shift)."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    start = tl.program_id(1) * M
    base = (batch.to(tl.int64) * T * Hq + head) * P
    o = load_tile(out_ptr + base, start, Hq * P, T, P, M, WIDTH, False).to(tl.float32)
    do = load_tile(dout_ptr + base, start, Hq * P, T, P, M, WIDTH, False).to(tl.float32)
    rows = start + tl.arange(0, M)
    at = (batch.to(tl.int64) * Hq + head) * T + rows
    tl.store(delta_ptr + at, tl.sum(o * do, 1), mask=rows < T)
    log = tl.load(lse_ptr + at, mask=rows < T, other=0.0)
    tl.store(shift_ptr + at, b - log * LOG2E, mask=rows < T)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, ids_ptr, spans_ptr, dout_ptr, delta_ptr, shift_ptr, dk_ptr, dv_ptr, T, qk_scale, a, grad_scale,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one key/value head. Logits are kept transposed, (N,M): P and dS then leave one
    product in the layout of the next one. Registers are scarce: each vector is loaded where it is used."""
    R: tl.constexpr = Hq // Hkv
    batch, group, block = tl.program_id(0) // Hkv, tl.program_id(0) % Hkv, tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    kv_head = (first_token * Hkv + group) * P
    columns = block * N + tl.arange(0, N)
    column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
    key = load_tile(k_ptr + kv_head, block * N, Hkv * P, T, P, N, WIDTH, EVEN)
    value = load_tile(v_ptr + kv_head, block * N, Hkv * P, T, P, N, WIDTH, EVEN)
    dkey, dvalue = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(R * (full if FULL else masked)):  # blocks and heads in one loop: one pipeline
            head = group * R + step % R
            start = loop_block(step // R, begin, before, full, FULL) * M
            rows = start + tl.arange(0, M)
            q_head, q_row = (first_token * Hq + head) * P, (batch.to(tl.int64) * Hq + head) * T
            query = load_tile(q_ptr + q_head, start, Hq * P, T, P, M, WIDTH, FULL or EVEN)
            do = load_tile(dout_ptr + q_head, start, Hq * P, T, P, M, WIDTH, FULL or EVEN)
            x = tl.dot(key, tl.trans(query), input_precision="ieee")
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")  # overlaps the exponentials
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + load_vector(shift_ptr + q_row, rows, T, FULL or EVEN)[None, :]
            if not FULL:
                row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
                x = apply_mask(x, rows, columns, row_ids, column_ids, T, True, CAUSAL, WINDOW, EVEN)
            p = tl.exp2(x)
            dsoftcap = softcap_bwd(p, u, SOFTCAP)
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            ds = dsoftcap * (dp - load_vector(delta_ptr + q_row, rows, T, FULL or EVEN)[None, :])
            dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    store_tile(dk_ptr + kv_head, block * N, Hkv * P, T, P, dkey * grad_scale, False)
    store_tile(dv_ptr + kv_head, block * N, Hkv * P, T, P, dvalue, False)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, ids_ptr, spans_ptr, dout_ptr, delta_ptr, shift_ptr, dq_ptr, T, qk_scale, a, grad_scale,
    Hq: tl.constexpr, Hkv: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dQ of M rows of one head, with the key-block loop of the forward."""
    batch, head = tl.program_id(0) // Hq, tl.program_id(0) % Hq
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = batch.to(tl.int64) * T
    q_head, kv_head = (first_token * Hq + head) * P, (first_token * Hkv + head // (Hq // Hkv)) * P
    q_row = (batch.to(tl.int64) * Hq + head) * T
    rows = block * M + tl.arange(0, M)
    row_ids = load_vector(ids_ptr + first_token, rows, T, EVEN)
    row_shift, row_delta = (
        load_vector(shift_ptr + q_row, rows, T, EVEN),
        load_vector(delta_ptr + q_row, rows, T, EVEN),
    )
    query = load_tile(q_ptr + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    do = load_tile(dout_ptr + q_head, block * M, Hq * P, T, P, M, WIDTH, EVEN)
    dquery = tl.zeros((M, WIDTH), tl.float32)
    span = spans_ptr + (batch * tl.num_programs(1) + block) * 4
    begin, before, full, masked = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    for FULL in tl.static_range(2):
        for step in range(full if FULL else masked):
            start = loop_block(step, begin, before, full, FULL) * N
            key = load_tile(k_ptr + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            value = load_tile(v_ptr + kv_head, start, Hkv * P, T, P, N, WIDTH, FULL or EVEN)
            x = tl.dot(query, tl.trans(key), input_precision="ieee")
            dp = tl.dot(do, tl.trans(value), input_precision="ieee")
            u = apply_softcap(x * qk_scale, SOFTCAP)
            x = u * a + row_shift[:, None]
            if not FULL:
                columns = start + tl.arange(0, N)
                column_ids = load_vector(ids_ptr + first_token, columns, T, EVEN)
                x = apply_mask(x, rows, columns, row_ids, column_ids, T, False, CAUSAL, WINDOW, EVEN)
            ds = softcap_bwd(tl.exp2(x), u, SOFTCAP) * (dp - row_delta[:, None])
            dquery = tl.dot(ds.to(key.dtype), key, dquery, input_precision="ieee")
    store_tile(dq_ptr + q_head, block * M, Hq * P, T, P, dquery * grad_scale, False)


def _tiles(P: int, dtype: torch.dtype) -> dict[str, tuple[int, int, int, int]]:
    """(M, N, warps, stages) of each kernel. fp32 runs on the FMA units and exhausts registers much sooner."""
    if dtype == torch.float32:
        return dict.fromkeys(("forward", "dkdv", "dq"), (32, 32, 4, 2) if P <= 64 else (16, 16, 4, 1))
    if P <= 64:
        return {"forward": (128, 64, 8, 2), "dkdv": (64, 64, 4, 2), "dq": (64, 64, 4, 2)}
    return {"forward": (128, 128, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)}


def _width(P: int) -> int:
    """Tile width for the head dim: a matrix product is at least 16 wide."""
    if P & (P - 1) or not 1 <= P <= 128:
        raise ValueError(f"attention: on CUDA the head dim must be a power of two up to 128, not {P}")
    return max(P, 16)


def _options(q: Tensor, k: Tensor, SOFTCAP: str, causal: bool, window: int) -> dict[str, Any]:
    """Return the compile-time arguments that all three kernels have, in Triton and in Gluon."""
    heads = {"Hq": q.shape[2], "Hkv": k.shape[2], "P": q.shape[3]}
    return heads | {"SOFTCAP": SOFTCAP, "CAUSAL": causal, "WINDOW": window}


def _hopper(SOFTCAP: str, q: Tensor, *others: Tensor) -> Any:
    """Return the module of the kernels for compute capability 9.0 if they can compute this call, None if not.

    They need triton 3.9 or later, P 64 or 128, bf16 or fp16, T a multiple of 128, and inputs at multiples of 16 bytes.
    """
    if q.shape[3] not in (64, 128) or q.shape[1] % 128 or q.dtype == torch.float32 or SOFTCAP == "exact":
        return None
    if any(t.data_ptr() % 16 for t in (q, *others)):
        return None
    return import_module("kernels.attention.hopper") if has_hopper_gluon(q) else None


def _launch(hopper: Any, name: str, q: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Return M, N and the launch options of a kernel: those in hopper.py, or if hopper is None in this file."""
    T, P = q.shape[1], q.shape[3]
    if hopper:
        return hopper.TILES[P][name]
    M, N, warps, stages = _tiles(P, q.dtype)[name]
    tile = {"WIDTH": _width(P), "M": M, "N": N, "EVEN": T % max(M, N) == 0}
    return M, N, tile | {"num_warps": warps, "num_stages": stages}


def attention_fwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float, softcap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """q (B,T,Hq,P), k and v (B,T,Hkv,P) fp32, fp16 or bf16, doc_ids (B,T) int32 -> out (B,T,Hq,P) in q.dtype,
    lse (B,Hq,T) fp32. Non-contiguous inputs are copied. Raises ValueError unless P is a power of two <= 128."""
    B, T, Hq, _ = q.shape
    q, k, v, doc_ids = (t.contiguous() for t in (q, k, v, doc_ids))
    SOFTCAP, qk_scale, a, b, _ = softcap_params(scale, softcap, q.dtype)
    hopper = _hopper(SOFTCAP, q, k, v)
    M, N, launch = _launch(hopper, "forward", q)
    spans = block_spans(doc_ids, M, N, False, causal, window)
    out, lse = q.new_empty(q.shape), q.new_empty((B, Hq, T), dtype=torch.float32)
    online = softcap == 0 or softcap > LARGEST_FIXED_CAP or q.dtype == torch.float16
    options = _options(q, k, SOFTCAP, causal, window) | {"ONLINE": online} | launch
    numbers, grid = (T, qk_scale, a, b), (B * Hq, spans.shape[1])
    if hopper:
        described = hopper.descriptors((q, M // 2), (k, N), (v, N), (out, M // 2))
        hopper.forward_kernel[grid](*described, doc_ids, spans, lse, *numbers, **options)
    else:
        _forward_kernel[grid](q, k, v, doc_ids, spans, out, lse, *numbers, **options)
    return out, lse


def attention_bwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, softcap: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in their shapes and dtype; bitwise deterministic. Arguments and errors as in the forward."""
    B, T, Hq, P = q.shape
    Hkv, width = k.shape[2], _width(P)
    q, k, v, doc_ids, out, lse, dout = (t.contiguous() for t in (q, k, v, doc_ids, out, lse, dout))
    SOFTCAP, qk_scale, a, b, grad_scale = softcap_params(scale, softcap, q.dtype)
    delta, shift = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    rows_grid = (B * Hq, triton.cdiv(T, 64))
    _rows_kernel[rows_grid](out, dout, lse, delta, shift, T, b, Hq=Hq, P=P, WIDTH=width, M=64, num_warps=4)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    options, numbers = _options(q, k, SOFTCAP, causal, window), (T, qk_scale, a, grad_scale)
    hopper = _hopper(SOFTCAP, q, k, v, dout)

    M, N, launch = _launch(hopper, "dkdv", q)
    spans = block_spans(doc_ids, N, M, True, causal, window)
    grid, vectors = (B * Hkv, spans.shape[1]), (doc_ids, spans, delta, shift)
    if hopper:
        keys = ((t, N // 2) for t in (k, v, dk, dv))
        described = hopper.descriptors((q, M), (dout, M), *keys)
        hopper.dkdv_kernel[grid](*described, *vectors, *numbers, **options, **launch)
    else:
        own = (q, k, v, doc_ids, spans, dout, delta, shift, dk, dv)
        _dkdv_kernel[grid](*own, *numbers, **options, **launch)

    M, N, launch = _launch(hopper, "dq", q)
    spans = block_spans(doc_ids, M, N, False, causal, window)
    grid, vectors = (B * Hq, spans.shape[1]), (doc_ids, spans, delta, shift)
    if hopper:
        described = hopper.descriptors((q, M // 2), (dout, M // 2), (k, N), (v, N), (dq, M // 2))
        hopper.dq_kernel[grid](*described, *vectors, *numbers, **options, **launch)
    else:
        _dq_kernel[grid](q, k, v, doc_ids, spans, dout, delta, shift, dq, *numbers, **options, **launch)
    return dq, dk, dv
