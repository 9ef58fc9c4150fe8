"""grouped_gemm against a loop of torch.mm over the experts: value, gradient, compilation, its four forms.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm.naive import grouped_gemm_naive
from kernels.grouped_gemm.padded import power_of_two_bucket
from suites.ops.grouped_gemm import make_inputs
from suites.support.comparison import DTYPES, doubled, error, gradients
from suites.support.custom_ops import check_compiled
from suites.support.instruments import host_syncs
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)
routings = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def three(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor, form=grouped_gemm) -> list[Tensor]:
    """Return y, dx, dweight for this dy."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = form(*leaves, counts)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@lanes("cpu", "h200")
def test_bucket_compiles_to_one_graph_for_every_routing(lane: Lane):
    def train(function, inputs):
        return gradients(function, *inputs)

    batches = [
        make_inputs(counts, device=lane.device) for counts in ((5, 0, 17, 8), (0, 32, 1, 0), (9, 9, 9, 9))
    ]
    padded = partial(grouped_gemm, impl="padded", bucket=32)
    # A batched product of other shapes may be summed in another order.
    report = check_compiled(padded, train, batches, op="grouped_gemm", calls=0, dynamic=(0,), tolerance=1e-12)
    assert report.unique_graphs == 1
    with host_syncs() as tally:
        train(padded, batches[0])
    assert tally["syncs"] == 0
    assert tally["aten::bmm"] == 3


@lanes("h200")
def test_reads_no_value_on_the_host(lane: Lane):
    inputs = make_inputs(D_in=64, D_out=128, dtype=torch.bfloat16, device=lane.device)
    gradients(grouped_gemm, *inputs)  # compiles
    leaves = [t.requires_grad_() for t in inputs[:2]]
    dy = torch.randn(len(inputs[0]), 128, device=lane.device).to(torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(grouped_gemm(*leaves, inputs[2]), leaves, dy)
        with pytest.raises(RuntimeError, match="synchronizing"):
            grouped_gemm(*inputs, impl="eager")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), counts=routings, spare=st.integers(0, 3))
def test_equals_the_loop_for_every_routing(lane: Lane, seed: int, counts: list[int], spare: int):
    """Unassigned rows may hold anything: their results are zero, and they affect nothing else."""
    x, weight, counts = make_inputs(counts, spare=spare, dtype=torch.float32, seed=seed, device=lane.device)
    dy = torch.randn(len(x), 16, generator=torch.Generator().manual_seed(seed)).to(x)
    used = int(counts.sum())
    plain = three(x, weight, counts, dy, form=grouped_gemm_naive)
    x[used:], dy[used:] = torch.nan, torch.nan
    for impl in ("op", "padded"):
        found = three(x, weight, counts, dy, form=partial(grouped_gemm, impl=impl))
        for ours, theirs in zip(found, plain):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (found[0][used:] == 0).all()
        assert (found[1][used:] == 0).all()
        assert (found[2][counts == 0] == 0).all()


@lanes("h200")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("D_out", [128, 256, 384, 896])
def test_wide_and_tall_tiles_equal_the_loop(lane: Lane, D_out: int, dtype: str):
    """Counts around the sides of both tiles of kernels/grouped_gemm/hopper.py; rows without expert hold nan."""
    counts = (0, 600, 3, 256, 0, 0, 127, 128, 129, 64, 65, 1, 255, 257, 512, 0)
    narrow = torch.bfloat16 if dtype == "bf16" else torch.float16
    x, weight, sizes = make_inputs(counts, 640, D_out, spare=37, dtype=narrow, device=lane.device)
    dy = torch.randn(len(x), D_out, generator=torch.Generator().manual_seed(1)).to(x)
    exact = three(*doubled((x, weight, sizes, dy)), form=grouped_gemm_naive)
    used = sum(counts)
    x[used:], dy[used:] = torch.nan, torch.nan
    found = three(x, weight, sizes, dy)
    for ours, theirs in zip(found, exact):
        rounding = {"bf16": 2**-8, "fp16": 2**-11}[dtype]
        torch.testing.assert_close(
            ours.double(), theirs, rtol=rounding, atol=2**-15 * float(theirs.abs().max())
        )
    assert not found[0][used:].any()
    assert not found[1][used:].any()


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), counts=routings)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_independent(lane: Lane, dtype: str, seed: int, counts: list[int]):
    """Permuted with their rows they give the same bits, and so does a single one; on the CPU up to rounding, because
    the product of a matrix at another address may be summed in another order.
    """
    x, weight, sizes = make_inputs(counts, 64, 64, dtype=DTYPES[dtype], seed=seed, device=lane.device)
    dy = torch.randn(len(x), 64, generator=torch.Generator().manual_seed(seed)).to(x)
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    starts = sizes.cumsum(0) - sizes
    rows = torch.cat([torch.arange(counts[e]) + int(starts[e]) for e in order]).to(sizes)

    def same(ours: Tensor, theirs: Tensor) -> None:
        tolerance = {"cuda": 0.0, "cpu": {"fp32": 1e-5, "bf16": 2**-7}[dtype]}[lane.device]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    y, dx, dweight = three(x, weight, sizes, dy)
    permuted = three(x[rows], weight[order], sizes[order], dy[rows])
    for ours, theirs in zip(permuted, (y[rows], dx[rows], dweight[order])):
        same(ours, theirs)
    first = rows[: counts[order[0]]]
    alone = three(x[first], weight[order[:1]], sizes[order[:1]], dy[first])
    for ours, theirs in zip(alone, (y[first], dx[first], dweight[order[:1]])):
        same(ours, theirs)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["op", "eager", "padded"])
def test_one_expert_may_take_all_rows(lane: Lane, impl: str, dtype: str):
    x, weight, counts = make_inputs((0, 300, 0), 64, 64, spare=0, dtype=DTYPES[dtype], device=lane.device)
    tolerance = {"fp32": 1e-4, "bf16": 2**-7}[dtype]
    found = grouped_gemm(x, weight, counts, impl=impl)
    torch.testing.assert_close(found, x @ weight[1], rtol=tolerance, atol=8 * tolerance)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int32_and_int64_counts_give_same_bits(lane: Lane, dtype: str):
    x, weight, counts = make_inputs(D_in=64, D_out=64, dtype=DTYPES[dtype], device=lane.device)
    for ours, theirs in zip(
        gradients(grouped_gemm, x, weight, counts.int()), gradients(grouped_gemm, x, weight, counts)
    ):
        assert torch.equal(ours, theirs)


@lanes("cpu", "h200")
def test_row_outside_its_bucket_is_nan(lane: Lane):
    inputs = make_inputs(device=lane.device)
    y = grouped_gemm(*inputs, impl="padded", bucket=16)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [21]  # the 17th row of the third expert
    assert not grouped_gemm(*inputs, impl="padded", bucket=32).isnan().any()
    assert [power_of_two_bucket(torch.tensor([0, n])) for n in (0, 1, 2, 3, 16, 17)] == [1, 1, 2, 4, 16, 32]


@lanes("cpu", "h200")
def test_upstream_equals_the_loop(lane: Lane):
    inputs = make_inputs((5, 0, 17, 10), 64, 128, spare=0, dtype=torch.bfloat16, device=lane.device)
    plain = gradients(grouped_gemm_naive, *doubled(inputs))
    for ours, exact in zip(gradients(partial(grouped_gemm, impl="upstream"), *inputs), plain):
        assert error(ours, exact)[0] <= 2**-8 * float(exact.abs().max()) + 1e-5


@lanes("cpu")
def test_torch_without_grouped_mm_raises_one_line_error(lane: Lane, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(F, "grouped_mm")
    with pytest.raises(ImportError, match=r"^grouped_gemm: .*grouped_mm.*pip install torch==\S+$"):
        grouped_gemm(*make_inputs(), impl="upstream")
