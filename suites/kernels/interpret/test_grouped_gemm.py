"""The Triton kernels of grouped_gemm under the interpreter: which tiles are used, and transposed inputs.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.grouped_gemm import kernel
from suites.ops import interpreted
from suites.ops.grouped_gemm import KERNEL_DIMS as DIMS
from suites.ops.grouped_gemm import RAGGED
from suites.support.lanes import Lane, lanes

OP = interpreted()["grouped_gemm"]


@lanes("cpu")
@pytest.mark.parametrize("dtype", OP.dtypes)
def test_tma_is_used_only_for_16_bit_whole_chunks(lane: Lane, dtype: str):
    """Checks which tiles the cases of OP ran with."""
    tiles = {}
    for D_in, D_out in DIMS:
        inputs = OP.example(dtype, (4,), D_in, D_out)
        tiles[D_in, D_out] = kernel._tile(D_out, inputs["x"], inputs["weight"])
    plain = kernel.PLAIN, False
    small = dtype == "fp16"
    assert tiles[32, 128] == ((kernel.WIDE, True) if small else plain)
    assert tiles[20, 35] == tiles[1, 3] == plain
    assert kernel._tile(96, *(torch.ones(4, 64, dtype=torch.float16),) * 2) == (kernel.TALL, True)


@lanes("cpu")
@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    spare=st.integers(-5, 20),
    height=st.sampled_from([3, 8, 16]),
)
def test_tile_plan_covers_every_row_once(lane: Lane, counts: list[int], spare: int, height: int):
    """Counts that add up to more rows than there are do not access a row beyond the end."""
    M = max(0, sum(counts) + spare)
    plan, used = kernel._plan(torch.tensor(counts), M, height)
    tiles, rows = used.tolist()
    assert tiles <= len(plan)
    assert rows == min(M, sum(counts))
    covered = []
    for expert, first, end in plan[:tiles].tolist():
        mine = range(first, min(first + height, end))
        assert len(mine) > 0
        covered += [(row, expert) for row in mine]
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    assert covered == list(enumerate(owners[:M]))


@lanes("cpu")
@pytest.mark.parametrize("dims", DIMS[1:3], ids=str)
def test_transposed_inputs_give_the_same_bits(lane: Lane, dims: tuple[int, int]):
    inputs = OP.example("fp16", RAGGED, *dims, spare=0)
    turned = {n: inputs[n].mT.contiguous().mT for n in ("x", "weight", "dy")}
    pairs = zip(OP.launched(**turned, counts=inputs["counts"].int()), OP.launched(**inputs))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)
