"""The Triton kernels of grouped_gemm under the interpreter, against the reference in fp64.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.grouped_gemm import kernel
from kernels.grouped_gemm.eager import grouped_gemm_backward_reference, grouped_gemm_reference
from suites.kernels.interpret.ratio import outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# Chunks of 32, in wide tiles one way and in tall tiles the other; then two that no descriptor fits.
DIMS = [(32, 128), (64, 32), (20, 35), (1, 3)]
ROUTINGS = {
    "ragged": (5, 0, 40, 9),
    "whole tiles": (16, 32, 0),
    "one expert": (0, 0, 35, 0),
    "none": (0, 0, 0, 0),
}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per program, expert and group, the last ones not full."""
    monkeypatch.setattr(kernel, "PROGRAMS", 3)
    monkeypatch.setattr(kernel, "PLAN_TILES", 8)
    monkeypatch.setattr(kernel, "GROUP", 2)
    for tile, (BM, BN, BK) in {"WIDE": (16, 64, 32), "TALL": (32, 32, 32), "PLAIN": (16, 32, 32)}.items():
        monkeypatch.setattr(kernel, tile, getattr(kernel, tile) | {"BM": BM, "BN": BN, "BK": BK})


def make_inputs(counts: tuple[int, ...], D_in: int, D_out: int, dtype: torch.dtype, spare: int = 8) -> Inputs:
    """Return x, weight, counts, dy; the unassigned rows at the end hold nan."""
    g = torch.Generator().manual_seed(D_in)
    used = sum(counts)
    x, dy = (torch.randn(used + spare, D, generator=g, dtype=torch.float64).to(dtype) for D in (D_in, D_out))
    x[used:] = dy[used:] = torch.nan
    weight = torch.randn(len(counts), D_in, D_out, generator=g, dtype=torch.float64).to(dtype)
    return x, weight, torch.tensor(counts), dy


def reference(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return y, dx, dweight."""
    y = grouped_gemm_reference(x, weight, counts)
    return y, *grouped_gemm_backward_reference(x, weight, counts, dy)


def launched(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = kernel.grouped_gemm_fwd_kernel(x, weight, counts)
    return y, *kernel.grouped_gemm_bwd_kernel(x, weight, counts, dy)


@lanes("cpu")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, dims: tuple[int, int], routing: str):
    counts = ROUTINGS[routing]
    inputs = make_inputs(counts, *dims, DTYPES[dtype])
    found = launched(*inputs)
    assert not outside(found, reference(*inputs), reference(*doubled(inputs)))
    assert all((t[sum(counts) :] == 0).all() for t in found[:2])
    assert (found[2][inputs[2] == 0] == 0).all()


@lanes("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tma_is_used_only_for_16_bit_whole_chunks(lane: Lane, dtype: str):
    """Checks which tiles a case above ran with."""
    tiles = {}
    for D_in, D_out in DIMS:
        x, weight, _, _ = make_inputs((4,), D_in, D_out, DTYPES[dtype])
        tiles[D_in, D_out] = kernel._tile(D_out, x, weight)
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
    """Also if the counts add up to more rows than there are: no row beyond the end is accessed."""
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
@pytest.mark.parametrize(("dtype", "dims"), [("fp32", (20, 35)), ("fp16", (32, 128)), ("fp16", (64, 32))])
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, dtype: str, dims: tuple[int, int]):
    x, weight, counts, dy = inputs = make_inputs(ROUTINGS["ragged"], *dims, DTYPES[dtype], spare=0)
    oracle, plain = reference(*doubled(inputs)), reference(*inputs)
    moved = counts + torch.tensor([1, 0, -1, 0])
    wrong = {
        "a row too many": (launched(x, weight, moved, dy), {"0", "1", "2"}),
        "next expert's matrix": (launched(x, weight.roll(1, 0), counts, dy), {"0", "1"}),
        "3 % of x": (launched(x * 1.03, weight, counts, dy), {"0", "2"}),
        "last row of dy": (launched(x, weight, counts, dy.index_fill(0, torch.tensor([53]), 0)), {"1", "2"}),
    }
    for name, (found, outputs) in wrong.items():
        assert {line.split(":")[0].split()[1] for line in outside(found, plain, oracle)} == outputs, name


@lanes("cpu")
@pytest.mark.parametrize("dims", DIMS[1:3], ids=str)
def test_input_layouts_do_not_matter(lane: Lane, dims: tuple[int, int]):
    x, weight, counts, dy = inputs = make_inputs(ROUTINGS["ragged"], *dims, torch.float16, spare=0)
    spread = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    turned = x.T.contiguous().T, weight.mT.contiguous().mT, counts.int(), dy.T.contiguous().T
    plain = launched(*inputs)
    for other in (spread, turned):
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(launched(*other), plain))
