"""The row product of grouped_gemm for compute capability 9.0 (H100, H200) in Gluon: y, and dx, with a producer warp.

One program per SM takes the tiles of the result in turn, by an atomic counter. Of its 12 warps, one copies chunks of
x and weight to shared memory with the TMA, and two groups of four multiply, each with 64 rows of a wide tile of
128 x 256. If N is an odd multiple of 128, the last 128 columns are in tall tiles of 256 x 128, of which one group has
rows 0 to 63 and 128 to 191, the other the rest. Whole tiles of both kinds take the same time and memory. Tall tiles
are spread evenly among the wide ones, so that both read a row of x while it is in L2. A group without a row of the
expert multiplies nothing.

There is no plan in memory: each warp holds the ends of all experts' rows, and compares a tile's number with them.

    small   STAGES buffers of 16 KiB: x of a wide tile, or weight of a tall one
    large   STAGES buffers of 32 KiB: weight of a wide tile, or x of a tall one
    ready   barriers: the TMA has filled both buffers of a slot
    free    barriers: both groups have read them
    queue   numbers of the next tiles, with barriers `announced` (by the producer) and `taken` (by both groups)

64 whole rows are stored by the TMA, 64 columns at a time, while the next tile begins; the last rows of an expert are
stored from registers with a mask. The bits of a result depend on its row of x and its column only.

M rows, E experts, K reduced dim, N columns of the result.
Sources: CUTLASS (persistent kernels with a producer warp), Triton's Gluon tutorials.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PROGRAMS = 132  # SMs of an H200: one program fills an SM
STAGES = 4
GROUP = 4  # row tiles that share x and weight in L2
LARGEST_E = 256  # each warp holds all ends in registers
LARGEST_M = 1 << 22  # _tall_before has 32 bits
ROWS, COLUMNS, CHUNK = 128, 128, 64  # tiles of the TMA
PART = 64  # rows of a product, and columns that are stored at once


@gluon.jit
def _ends(counts_ptr, M, E: gl.constexpr, BLOCK: gl.constexpr):
    """Return for each expert the end of its rows, clamped to M, and of its wide and of its tall tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0])  # a copy in each warp
    e = gl.arange(0, BLOCK, layout=LAYOUT)
    count = gl.load(counts_ptr + e, mask=e < E, other=0).to(gl.int32)
    sums = gl.cumsum(count, 0)
    end = gl.minimum(sums, M)
    rows = end - gl.minimum(sums - count, M)
    return end, gl.cumsum((rows + 127) // 128, 0), gl.cumsum((rows + 255) // 256, 0)


@gluon.jit
def _items(wide_end, tall_end, N):
    """Return the number of wide and of tall tiles."""
    return gl.max(wide_end, 0) * (N // 256), gl.max(tall_end, 0) * (N // 128 % 2)


@gluon.jit
def _tall_before(item, wide, tall):
    """Return the number of tall tiles among the first items. It grows evenly, by at most 1, and ends at `tall`."""
    share = tall * 65536 // (wide + tall)
    return gl.minimum(gl.maximum(item * share // 65536, item - wide), tall)


@gluon.jit
def _tile(item, wide, tall, end, wide_end, tall_end, M, N, GROUP: gl.constexpr):
    """Return whether the tile is tall, its expert, first row, end of the expert's rows, and first column."""
    before = _tall_before(item, wide, tall)
    is_tall = _tall_before(item + 1, wide, tall) > before
    across = gl.maximum(N // 256, 1)
    group_first = (item - before) // (GROUP * across) * GROUP
    height = gl.maximum(gl.minimum(gl.max(wide_end, 0) - group_first, GROUP), 1)
    within = (item - before) % (GROUP * across)
    tile = gl.where(is_tall, before, group_first + within % height)
    column = gl.where(is_tall, N - 128, within // height * 256)
    tiles_end = gl.where(is_tall, tall_end, wide_end)
    passed = tiles_end <= tile
    expert = gl.sum(passed.to(gl.int32), 0)
    inside = tile - gl.max(gl.where(passed, tiles_end, 0), 0)
    first = gl.max(gl.where(passed, end, 0), 0) + inside * gl.where(is_tall, 256, 128)
    return is_tall, expert, first, gl.min(gl.where(passed, M, end), 0), column


@gluon.jit
def _draw(counter_ptr, queue, announced, taken, turn):
    """Take the number of the next tile, and announce it to both groups."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    mbarrier.wait(taken.index(turn % 2), ((turn // 2) & 1) ^ 1)
    queue.index(turn % 2).store(gl.full([1], item, gl.int32, LAYOUT))
    mbarrier.arrive(announced.index(turn % 2))
    return item


@gluon.jit
def _follow(queue, announced, taken, turn):
    """Return the number that was announced."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(announced.index(turn % 2), (turn // 2) & 1)
    item = gl.max(queue.index(turn % 2).load(LAYOUT), 0)
    mbarrier.arrive(taken.index(turn % 2))
    return item


@gluon.jit
def _load(
    x_desc, weight_desc, counts_ptr, counter_ptr, small, large, ready, free, queue, announced, taken, M, K, N,
    E: gl.constexpr, BLOCK: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the chunks of each tile."""
    BK: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = 3 * x_desc.nbytes_per_cta
    HEIGHT: gl.constexpr = weight_desc.block_shape[0]
    WIDTH: gl.constexpr = weight_desc.block_shape[1]
    WEIGHT: gl.constexpr = weight_desc.layout
    X: gl.constexpr = x_desc.layout
    small_x = small.reinterpret(small.dtype, [STAGES, 128, BK], X)
    large_x = large.reinterpret(small.dtype, [2 * STAGES, 128, BK], X)
    small_weight = small.reinterpret(small.dtype, [STAGES, HEIGHT, WIDTH], WEIGHT)
    large_weight = large.reinterpret(small.dtype, [2 * STAGES, HEIGHT, WIDTH], WEIGHT)
    end, wide_end, tall_end = _ends(counts_ptr, M, E, BLOCK)
    wide, tall = _items(wide_end, tall_end, N)
    done = 0
    turn = 0
    item = _draw(counter_ptr, queue, announced, taken, turn)
    while item < wide + tall:
        is_tall, expert, first, _, column = _tile(item, wide, tall, end, wide_end, tall_end, M, N, GROUP)
        for k in range(0, K, BK):
            slot = done % STAGES
            filled = ready.index(slot)
            mbarrier.wait(free.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, BYTES)
            if TRANSPOSED:
                row, across, next_row, next_column = expert * N + column, k, 128, 0
            else:
                row, across, next_row, next_column = expert * K + k, column, 0, 128
            if is_tall:
                tma.async_load(x_desc, [first, k], filled, large_x.index(2 * slot))
                tma.async_load(x_desc, [first + 128, k], filled, large_x.index(2 * slot + 1))
                tma.async_load(weight_desc, [row, across], filled, small_weight.index(slot))
            else:
                tma.async_load(x_desc, [first, k], filled, small_x.index(slot))
                tma.async_load(weight_desc, [row, across], filled, large_weight.index(2 * slot))
                right = large_weight.index(2 * slot + 1)
                tma.async_load(weight_desc, [row + next_row, across + next_column], filled, right)
            done += 1
        turn += 1
        item = _draw(counter_ptr, queue, announced, taken, turn)


@gluon.jit
def _pass(ready, free, done, steps, STAGES: gl.constexpr):
    """Release the chunks of a tile without use."""
    for step in range(done, done + steps):
        mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(free.index(step % STAGES))


@gluon.jit
def _arrived(weight, ready, step, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Wait for the chunks of a step, and return the chunk of weight as (K,N)."""
    mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
    b = weight.index(step % STAGES)
    if TRANSPOSED:
        b = b.permute((1, 0))
    return b


@gluon.jit
def _product(
    x, weight, ready, free, done, steps, half: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Return 64 rows of a wide tile. A chunk's product is waited for when the next one is issued."""
    N: gl.constexpr = 256
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc = gl.zeros([64, N], gl.float32, RESULT)
    for step in range(done, done + steps):
        slot = step % STAGES
        b = _arrived(weight, ready, step, STAGES, TRANSPOSED)
        acc = warpgroup_mma(x.index(2 * slot + half), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > done)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index((done + steps - 1) % STAGES))
    return acc


@gluon.jit
def _two_products(
    x, weight, ready, free, done, steps, half: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Return twice 64 rows of a tall tile. Both are computed even if the second has no row of the expert: a branch for
    one of them alone makes ptxas wait after each wgmma (its note C7511)."""
    N: gl.constexpr = 128
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc, other = gl.zeros([64, N], gl.float32, RESULT), gl.zeros([64, N], gl.float32, RESULT)
    for step in range(done, done + steps):
        slot = step % STAGES
        b = _arrived(weight, ready, step, STAGES, TRANSPOSED)
        acc = warpgroup_mma(x.index(4 * slot + half), b, acc, is_async=True)
        other = warpgroup_mma(x.index(4 * slot + 2 + half), b, other, is_async=True)
        acc, other = warpgroup_mma_wait(2, [acc, other])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > done)
    acc, other = warpgroup_mma_wait(0, [acc, other])
    mbarrier.arrive(free.index((done + steps - 1) % STAGES))
    return acc, other


@gluon.jit
def _halves(x):
    """Return the left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store_part(part, turn: gl.constexpr, y_desc, y_ptr, staging, row, column, stop, N):
    """Store 64 rows and columns: by TMA if all rows are before `stop`, from registers if not."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    result = gl.convert_layout(part.to(y_desc.dtype), LAYOUT, assert_trivial=True)
    if row + 64 <= stop:
        tma.store_wait(1)  # the part before the last one, from the same buffer
        staging.index(turn).store(result)
        fence_async_shared()
        tma.async_store(y_desc, [row, column], staging.index(turn))
    else:
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        c = column + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        at = y_ptr + r.to(gl.int64)[:, None] * N + c[None, :]
        gl.store(at, result, mask=(r < stop)[:, None])


@gluon.jit
def _store(acc, y_desc, y_ptr, staging, row, column, stop, N):
    """Store 64 rows of 128 columns."""
    left, right = _halves(acc)
    _store_part(left, 0, y_desc, y_ptr, staging, row, column, stop, N)
    _store_part(right, 1, y_desc, y_ptr, staging, row, column + 64, stop, N)


@gluon.jit
def _multiply(
    half: gl.constexpr, x_desc, weight_desc, y_desc, y_ptr, counts_ptr,
    small, large, staging, ready, free, queue, announced, taken, M, K, N,
    E: gl.constexpr, BLOCK: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each wide tile, and twice 64 of each tall one."""
    BK: gl.constexpr = x_desc.block_shape[1]
    X: gl.constexpr = x_desc.layout
    WEIGHT: gl.constexpr = weight_desc.layout
    small_x = small.reinterpret(small.dtype, [2 * STAGES, 64, BK], X)
    large_x = large.reinterpret(small.dtype, [4 * STAGES, 64, BK], X)
    if TRANSPOSED:
        small_weight = small.reinterpret(small.dtype, [STAGES, 128, BK], WEIGHT)
        large_weight = large.reinterpret(small.dtype, [STAGES, 256, BK], WEIGHT)
    else:
        small_weight = small.reinterpret(small.dtype, [STAGES, BK, 128], WEIGHT)
        large_weight = large.reinterpret(small.dtype, [STAGES, BK, 256], WEIGHT)
    end, wide_end, tall_end = _ends(counts_ptr, M, E, BLOCK)
    wide, tall = _items(wide_end, tall_end, N)
    steps = K // BK
    done = 0
    turn = 0
    item = _follow(queue, announced, taken, turn)
    while item < wide + tall:
        is_tall, _, first, stop, column = _tile(item, wide, tall, end, wide_end, tall_end, M, N, GROUP)
        row = first + half * 64
        if row >= stop:
            _pass(ready, free, done, steps, STAGES)
        elif not is_tall:
            acc = _product(small_x, large_weight, ready, free, done, steps, half, STAGES, TRANSPOSED)
            left, right = _halves(acc)
            _store(left, y_desc, y_ptr, staging, row, column, stop, N)
            _store(right, y_desc, y_ptr, staging, row, column + 128, stop, N)
        else:
            above, below = _two_products(
                large_x, small_weight, ready, free, done, steps, half, STAGES, TRANSPOSED
            )
            _store(above, y_desc, y_ptr, staging, row, column, stop, N)
            _store(below, y_desc, y_ptr, staging, row + 128, column, stop, N)
        done += steps
        turn += 1
        item = _follow(queue, announced, taken, turn)
    if half == 0:
        _clear(y_ptr, gl.max(end, 0), M, N)
    tma.store_wait(0)


@gluon.jit
def _clear(y_ptr, used, M, N):
    """Write zeros to the rows from `used` on, which belong to no expert."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    zeros = gl.zeros([8, 128], y_ptr.dtype.element_ty, LAYOUT)
    for row in range(used + gl.program_id(0) * 8, M, gl.num_programs(0) * 8):
        r = row + gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
        for column in range(0, N, 128):
            c = column + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
            gl.store(y_ptr + r.to(gl.int64)[:, None] * N + c[None, :], zeros, mask=(r < M)[:, None])


@gluon.jit
def rows_kernel(
    x_desc, weight_desc, y_desc, y_ptr, counts_ptr, counter_ptr, M, K, N,
    E: gl.constexpr, BLOCK: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y (M,N) from x (M,K) and weight (E,K,N), or (E,N,K) if TRANSPOSED."""
    BK: gl.constexpr = x_desc.block_shape[1]
    small = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, BK], x_desc.layout)
    large = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 256, BK], x_desc.layout)
    staging = gl.allocate_shared_memory(y_desc.dtype, [2, 64, 64], y_desc.layout)
    other_staging = gl.allocate_shared_memory(y_desc.dtype, [2, 64, 64], y_desc.layout)
    ready, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced, taken = mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2)
    for slot in gl.static_range(2):
        mbarrier.init(announced.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (
            0, x_desc, weight_desc, y_desc, y_ptr, counts_ptr,
            small, large, staging, ready, free, queue, announced, taken, M, K, N,
            E, BLOCK, TRANSPOSED, GROUP, STAGES,
        )),
        (_multiply, (
            1, x_desc, weight_desc, y_desc, y_ptr, counts_ptr,
            small, large, other_staging, ready, free, queue, announced, taken, M, K, N,
            E, BLOCK, TRANSPOSED, GROUP, STAGES,
        )),
        (_load, (
            x_desc, weight_desc, counts_ptr, counter_ptr,
            small, large, ready, free, queue, announced, taken, M, K, N,
            E, BLOCK, TRANSPOSED, GROUP, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


def takes(N: int, counts: Tensor, *operands: Tensor) -> bool:
    """Return whether rows_kernel computes a result of N columns from these contiguous x and weight."""
    return (
        N % COLUMNS == 0
        and counts.shape[0] <= LARGEST_E
        and operands[0].shape[0] <= LARGEST_M
        and all(
            t.element_size() == 2 and t.shape[-1] % CHUNK == 0 and t.data_ptr() % 16 == 0 and t.numel() > 0
            for t in operands
        )
    )


def multiply_rows(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """x (M,K) times weight (E,K,N), or (E,N,K) if transposed -> (M,N). All contiguous."""
    M, K = x.shape
    E, N = weight.shape[0], weight.shape[1 if transposed else 2]
    y = x.new_empty((M, N))
    described = (
        _described(x, ROWS, CHUNK),
        _described(weight, *((COLUMNS, CHUNK) if transposed else (CHUNK, COLUMNS))),
        _described(y, PART, PART),
    )
    rows_kernel[(PROGRAMS,)](
        *described, y, counts, counts.new_zeros((), dtype=torch.int32), M, K, N,
        E=E, BLOCK=max(32, triton.next_power_of_2(E)), TRANSPOSED=transposed, GROUP=GROUP, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return y


def _described(t: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describe a matrix (..., columns) to the TMA in tiles of height x width."""
    columns = t.shape[-1]
    rows = t.numel() // columns
    return TensorDescriptor(
        t, [rows, columns], [columns, 1], [height, width], _layout(height, width, t.dtype)
    )


@cache
def _layout(height: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([height, width], kind)
