"""grouped_gemm in Triton, forward and backward. The counts stay on the device.

Plan. One small kernel turns the counts into a list of row tiles: expert, first row, end. A tile never has rows of
two experts, so there are at most M / BM + E tiles; the host uses this bound, the exact number stays on the device.

y, and dx with the transposed weight: one program per SM loops over the tiles of the output, expert by expert and
in groups of GROUP row tiles, which share x and weight in L2. The two loops are flattened to one, so that the loads
of a tile overlap the store of the previous one. At the end the programs write zeros to the rows that belong to no
expert.

dweight: one program per tile of one expert's matrix, a sum over the expert's rows. Whole chunks of rows first, then
one with the rows past the end masked in both operands: rows of the next expert may contain inf or nan.

16-bit operands are loaded by TMA if D_in and D_out are multiples of a chunk, so that no tile crosses into the next
expert's matrix; other sizes, and fp32, use masked loads in smaller tiles.
On compute capability 9.0 with triton 3.9 or later, hopper.py computes y and dx without a plan: see `_hopper`.

FLOP: 2 M D_in D_out forward, twice that backward. At 98,304 rows, 64 experts, 3584 x 896: 0.63 TFLOP, 0.87 ms at 725
TFLOP/s. Tiles are 128 x 256 or 256 x 128: a partial tile costs as much as a full one, so the long side is along the
columns only if it divides them; the last row tile of an expert is half full, on average.

M rows, E experts, D_in and D_out model dims, BM x BN tile of a result, BK chunk of the reduced dim.
"""

from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels._triton.hopper import has_hopper_gluon

PROGRAMS = 132  # SMs of an H200: one tile fills an SM
PLAN_TILES = 64  # plan entries written by one program
GROUP = 8  # row tiles
EMPTY = 16  # rows zeroed at a time
WIDE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 4}
TALL = {"BM": 256, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4}
PLAIN = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}


@triton.jit
def _ranges(counts_ptr, M, E: tl.constexpr, BLOCK: tl.constexpr):
    """First row and end of each expert's rows, clamped to M."""
    e = tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + e, e < E, 0).to(tl.int32)
    end = tl.cumsum(count, 0)
    return tl.minimum(end - count, M), tl.minimum(end, M)


@triton.jit
def _plan_kernel(
    counts_ptr,
    plan_ptr,
    used_ptr,
    M,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write plan (tiles, 3): expert, first row, end of its rows; used (2,): number of tiles, number of rows."""
    start, end = _ranges(counts_ptr, M, E, BLOCK)
    tiles = tl.cdiv(end - start, BM)
    tiles_end = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    expert = tl.sum((tiles_end[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = expert[:, None] == tl.arange(0, BLOCK)[None, :]
    before = tl.sum(tl.where(mine, (tiles_end - tiles)[None, :], 0), 1)
    first = tl.sum(tl.where(mine, start[None, :], 0), 1) + (tile - before) * BM
    total = tl.sum(tiles, 0)
    tl.store(plan_ptr + tile * 3, expert, tile < total)
    tl.store(plan_ptr + tile * 3 + 1, first, tile < total)
    tl.store(plan_ptr + tile * 3 + 2, tl.sum(tl.where(mine, end[None, :], 0), 1), tile < total)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, total)
        tl.store(used_ptr + 1, tl.max(end, 0))


@triton.jit
def _block(x_ptr, row, column, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Load (HEIGHT,WIDTH) of a row-major matrix from (row, column) on: zeros past (rows, columns); with TMA, only
    past the whole matrix."""
    if TMA:
        block = x_ptr.load([row, column])
    else:
        r, c = row + tl.arange(0, HEIGHT)[:, None], column + tl.arange(0, WIDTH)[None, :]
        block = tl.load(x_ptr + r.to(tl.int64) * columns + c, (r < rows) & (c < columns), 0)
    return block


@triton.jit
def _rows_kernel(
    x_ptr, weight_ptr, y_ptr, plan_ptr, used_ptr, M, K, N, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """y (M,N) from x (M,K) and weight (E,K,N), or (E,N,K) if TRANSPOSED."""
    row_tiles, rows_used = tl.load(used_ptr), tl.load(used_ptr + 1)
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * across, tl.num_programs(0), flatten=True):
        group_first = tile // (GROUP * across) * GROUP
        height = tl.minimum(row_tiles - group_first, GROUP)
        within = tile % (GROUP * across)
        entry = plan_ptr + (group_first + within % height) * 3
        n = within // height * BN
        expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = _block(x_ptr, first, k, end, K, BM, BK, TMA)
            if TRANSPOSED:
                top = expert * N
                b = _block(weight_ptr, top + n, k, top + N, K, BN, BK, TMA).T
            else:
                top = expert * K
                b = _block(weight_ptr, top + k, n, top + K, N, BK, BN, TMA)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        r, c = first + tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :]
        at = y_ptr + r.to(tl.int64) * N + c
        tl.store(at, acc.to(y_ptr.dtype.element_ty), (r < end) & (c < N))
    for row in range(rows_used + tl.program_id(0) * EMPTY, M, tl.num_programs(0) * EMPTY):
        r = row + tl.arange(0, EMPTY)[:, None]
        for n in range(0, N, BN):
            c = n + tl.arange(0, BN)[None, :]
            tl.store(
                y_ptr + r.to(tl.int64) * N + c,
                tl.zeros((EMPTY, BN), y_ptr.dtype.element_ty),
                (r < M) & (c < N),
            )


@triton.jit
def _weight_kernel(
    x_ptr, dy_ptr, counts_ptr, dweight_ptr, M, D_in, D_out, E: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dweight (E,D_in,D_out) from x (M,D_in) and dy (M,D_out)."""
    across, expert = tl.cdiv(D_out, BN), tl.program_id(1)
    i, n = tl.program_id(0) // across * BM, tl.program_id(0) % across * BN
    start, end = _ranges(counts_ptr, M, E, BLOCK)
    mine = tl.arange(0, BLOCK) == expert
    first, stop = tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    whole = first + (stop - first) // BK * BK
    acc = tl.zeros((BM, BN), tl.float32)
    for row in range(first, whole, BK):
        a = _block(x_ptr, row, i, stop, D_in, BK, BM, TMA)
        b = _block(dy_ptr, row, n, stop, D_out, BK, BN, TMA)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    if whole < stop:
        inside = (whole + tl.arange(0, BK) < stop)[:, None]
        a = _block(x_ptr, whole, i, stop, D_in, BK, BM, TMA)
        b = _block(dy_ptr, whole, n, stop, D_out, BK, BN, TMA)
        a, b = tl.where(inside, a, 0.0).to(a.dtype), tl.where(inside, b, 0.0).to(b.dtype)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    r, c = i + tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :]
    at = dweight_ptr + expert.to(tl.int64) * D_in * D_out + r * D_out + c
    tl.store(at, acc.to(dweight_ptr.dtype.element_ty), (r < D_in) & (c < D_out))


def _tile(columns: int, *operands: Tensor) -> tuple[dict[str, int], bool]:
    """Tile shape and launch options for a result with `columns` columns, and whether operands are loaded by TMA."""
    chunk = WIDE["BK"]
    tma = columns % chunk == 0 and all(
        t.element_size() == 2 and t.shape[-1] % chunk == 0 and t.data_ptr() % 16 == 0 and t.numel() > 0
        for t in operands
    )
    if not tma:
        return PLAIN, False
    return WIDE if columns % WIDE["BN"] == 0 else TALL, True


def _source(t: Tensor, tma: bool, height: int, width: int) -> Tensor | TensorDescriptor:
    """Kernel argument for a matrix (..., columns): its rows, or with TMA a descriptor of height x width tiles."""
    return TensorDescriptor.from_tensor(t.view(-1, t.shape[-1]), [height, width]) if tma else t


def _plan(counts: Tensor, M: int, height: int) -> tuple[Tensor, Tensor]:
    E = counts.shape[0]
    most = M // height + E
    plan = counts.new_empty((most, 3), dtype=torch.int32)
    used = counts.new_empty(2, dtype=torch.int32)
    _plan_kernel[(triton.cdiv(most, PLAN_TILES),)](
        counts, plan, used, M, E=E, BLOCK=triton.next_power_of_2(E), BM=height, TILES=PLAN_TILES, num_warps=4
    )
    return plan, used


def _hopper(N: int, x: Tensor, weight: Tensor, counts: Tensor) -> Any:
    """Return the module of the row product for compute capability 9.0 if it can compute this call, None if not.

    It needs triton 3.9 or later and N a multiple of 128; `takes` in hopper.py has the other limits.
    """
    if not has_hopper_gluon(x):
        return None
    hopper = import_module("kernels.grouped_gemm.hopper")
    return hopper if hopper.takes(N, counts, x, weight) else None


def _multiply_rows(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """x (M,K) times weight (E,K,N), or (E,N,K) if transposed -> (M,N). All contiguous."""
    M, K = x.shape
    N = weight.shape[1] if transposed else weight.shape[2]
    if hopper := _hopper(N, x, weight, counts):
        return hopper.multiply_rows(x, weight, counts, transposed)
    y = x.new_empty((M, N))
    tile, tma = _tile(N, x, weight)
    BM, BN, BK = tile["BM"], tile["BN"], tile["BK"]
    plan, used = _plan(counts, M, BM)
    _rows_kernel[(PROGRAMS,)](
        _source(x, tma, BM, BK), _source(weight, tma, *((BN, BK) if transposed else (BK, BN))), y, plan, used, M, K, N,
        TRANSPOSED=transposed, TMA=tma, GROUP=GROUP, EMPTY=EMPTY, **tile,
    )  # fmt: skip
    return y


def grouped_gemm_fwd_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Implement bumpgate::grouped_gemm_fwd: x (M,D_in), weight (E,D_in,D_out), counts (E,)
    -> y (M,D_out)."""
    return _multiply_rows(x.contiguous(), weight.contiguous(), counts.contiguous(), transposed=False)


def grouped_gemm_bwd_kernel(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Implement bumpgate::grouped_gemm_bwd: gradients of x and weight from dy (M,D_out)."""
    x, weight, counts, dy = (t.contiguous() for t in (x, weight, counts, dy))
    (E, D_in, D_out), M = weight.shape, x.shape[0]
    dweight = torch.empty_like(weight)
    tile, tma = _tile(D_out, x, dy)
    BM, BN, BK = tile["BM"], tile["BN"], tile["BK"]
    _weight_kernel[(triton.cdiv(D_in, BM) * triton.cdiv(D_out, BN), E)](
        _source(x, tma, BK, BM), _source(dy, tma, BK, BN), counts, dweight, M, D_in, D_out,
        E=E, BLOCK=triton.next_power_of_2(E), TMA=tma, **tile,
    )  # fmt: skip
    return _multiply_rows(dy, weight, counts, transposed=True), dweight
