"""What is particular to the ops of an E block: moe_dispatch, grouped_gemm and moe_combine.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence), M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm.naive import grouped_gemm_naive
from kernels.grouped_gemm.padded import power_of_two_bucket
from kernels.moe_combine import moe_combine, moe_combine_eager
from kernels.moe_combine.naive import moe_combine_naive
from kernels.moe_dispatch import moe_dispatch, moe_dispatch_backward_eager
from kernels.moe_dispatch.naive import moe_dispatch_naive
from suites.ops import grouped_gemm as gemm
from suites.ops import moe_combine as combine
from suites.ops.moe_dispatch import E, make_inputs
from suites.support.comparison import DTYPES, doubled, error, gradients
from suites.support.custom_ops import check_compiled
from suites.support.instruments import host_syncs
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick

BOUND = 1e-5  # for the fp32 output before its cast: right reads 6e-8 (random) and 6e-7 (cancelling), wrong 2e-3 up
routings = st.lists(st.integers(0, 9), min_size=1, max_size=5)
sizes = {
    "seed": st.integers(0, 99),
    "B": st.integers(1, 3),
    "T": st.integers(1, 17),
    "K": st.integers(1, 4),
    "C": st.integers(1, 8),
}


def train(function, inputs):
    return gradients(function, *inputs)


# moe_dispatch.


def gradient(dispatch: Callable[..., tuple[Tensor, ...]], x: Tensor, expert: Tensor, bucket: int) -> Tensor:
    """Return the gradient of x, for a fixed random weighting of `padded`."""
    return gradients(dispatch, x, expert, E, bucket)[-1]


@lanes("cpu", "h200")
def test_every_token_is_placed_bit_by_bit(lane: Lane, row) -> None:
    wrong, rows, dropped = 0, 0, {}
    for dtype, bucket in product(DTYPES.values(), (1, 4, 8, 16)):
        x, expert = make_inputs(dtype=dtype, device=lane.device)
        padded, slot, overflow = moe_dispatch(x, expert, E, bucket)
        expected = moe_dispatch_naive(x, expert, E, bucket)
        wrong += int((padded != expected[0]).any(-1).sum() + (slot != expected[1]).sum())
        rows += padded.shape[0] * padded.shape[1] + slot.numel()
        dropped[bucket] = int(overflow)
        assert torch.equal(overflow, expected[2])
        assert (padded.dtype, slot.dtype, overflow.dtype) == (dtype, torch.int64, torch.int64)
    assert dropped[1] > dropped[4] > dropped[16] == 0
    row.count(
        f"kernels/moe_dispatch-{lane.name}/misplaced_rows", wrong, unit="rows", expected=0, rule="C36",
        seen=rows, evidence=[f"dropped, by bucket: {dropped}"],
    )  # fmt: skip


@lanes("cpu")
def test_wrong_placements_differ_from_the_loop(lane: Lane) -> None:
    """Later tokens first, the choices k by k, and one group for the whole batch."""
    x, expert = make_inputs()
    padded, slot, overflow = moe_dispatch_naive(x, expert, E, 4)
    assert not torch.equal(moe_dispatch(x.flip(1), expert.flip(1), E, 4)[0], padded)
    by_k = expert.transpose(1, 2).reshape(2, -1, 1)
    _, place, dropped = moe_dispatch(x.repeat(1, 3, 1), by_k, E, 4)
    assert not torch.equal(place.reshape(2, 3, 17).transpose(1, 2), slot)
    assert torch.equal(dropped, overflow)
    assert not torch.equal(moe_dispatch(x.reshape(1, 34, 4), expert.reshape(1, 34, 3), E, 8)[0], padded)


@lanes("cpu")
def test_backward_graph_has_an_fp32_sum(lane: Lane) -> None:
    """Read from the graph: a bf16 sum in torch is fp32 inside, so that the values cannot show it."""
    x, expert = make_inputs(dtype=torch.bfloat16)
    padded, slot, _ = moe_dispatch(x, expert, E, 4)
    graph = make_fx(lambda *t: moe_dispatch_backward_eager(*t, 4))(padded, expert, slot).graph
    sums = [n.meta["val"].dtype for n in graph.nodes if str(n.target).startswith("aten.sum")]
    assert sums == [torch.float32]


@lanes("cpu", "h200")
@pytest.mark.parametrize("impl", ["op", "eager"])
def test_one_graph_for_every_batch_and_every_routing(lane: Lane, impl: str, row, canaries) -> None:
    canaries("graphs")
    batches = [
        (*make_inputs(B=B, seed=seed, device=lane.device), E, 4) for B in (2, 8, 32) for seed in (0, 1)
    ]
    dispatch, calls = partial(moe_dispatch, impl=impl), int(impl == "op")
    report = check_compiled(dispatch, train, batches, op="moe_dispatch", calls=calls, dynamic=(0, 1))
    row.count(
        f"kernels/moe_dispatch-{lane.name}-{impl}/unique_graphs", report.unique_graphs, unit="graphs",
        expected=1, rule="C12", seen=len(batches), evidence=[f"{g.ops} operators" for g in report.graphs],
    )  # fmt: skip


@lanes("cpu")
def test_dispatch_reads_no_value_on_the_host(lane: Lane) -> None:
    x, expert = make_inputs()
    for bucket in (2, 16):
        with host_syncs() as tally:
            gradient(moe_dispatch, x, expert, bucket)
        assert tally["syncs"] == tally["aten::nonzero"] == 0
        assert tally["bumpgate::moe_dispatch_fwd"] == tally["bumpgate::moe_dispatch_bwd"] == 1
    with host_syncs() as tally:
        int(moe_dispatch(x, expert, E, 2)[2])
    assert tally["syncs"] == 1


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), B=st.integers(1, 3), T=st.integers(1, 17), K=st.sampled_from([1, 2, 4]))
def test_dispatch_then_combine_is_the_identity(lane: Lane, seed: int, B: int, T: int, K: int) -> None:
    """Identity experts and weights 1/K, a power of two: nothing rounds."""
    x, expert = make_inputs(B, T, K, seed=seed, device=lane.device)
    padded, slot, overflow = moe_dispatch(x, expert, E, T)
    weights = torch.full(expert.shape, 1 / K, device=lane.device)
    assert int(overflow) == 0
    assert torch.equal(moe_combine(padded, expert, slot, weights, T), x)
    if T > 1:
        full = moe_dispatch(x, expert * 0, E, 1)  # all tokens choose expert 0: only the first gets a slot
        back = moe_combine(full[0], expert * 0, full[1], weights * K, 1)
        assert torch.equal(back[:, 0], x[:, 0])
        assert (back[:, 1:] == 0).all()


@lanes("cpu", "h200")
@pytest.mark.parametrize("impl", ["op", "eager"])
def test_dispatch_and_combine_compile_to_one_graph(lane: Lane, impl: str) -> None:
    """Dispatch, one product per expert, combine: the path through an E block."""

    def there_and_back(x: Tensor, expert: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
        padded, slot, _ = moe_dispatch(x, expert, 6, 8, impl=impl)
        return moe_combine(torch.bmm(padded, matrix), expert, slot, weights, 8, impl=impl)

    g = torch.Generator(device=lane.device).manual_seed(0)
    batches = []
    for B in (2, 8, 32):
        _, expert, _, weights, _ = combine.make_inputs(B=B, dtype=torch.float32, device=lane.device)
        shapes = (B, 24, 8), (6, 8, 8)
        x, matrix = (torch.randn(*shape, generator=g, device=lane.device) for shape in shapes)
        batches.append((x, expert, weights, matrix))
    # Bitwise without atomics: the plain reference on a GPU may sum in another order.
    tolerance = 0.0 if impl == "op" and lane.device == "cpu" else 1e-5
    report = check_compiled(
        there_and_back, train, batches,
        op="moe_combine", calls=int(impl == "op"), dynamic=(0, 1, 2), tolerance=tolerance,
    )  # fmt: skip
    assert report.unique_graphs == 1


# moe_combine.


def relative(found: Tensor, oracle: Tensor) -> float:
    """Return the relative Frobenius norm of the difference."""
    return float((found.double() - oracle).norm() / oracle.norm())


def routed(kind: str, device: str) -> combine.Inputs:
    """Return bf16 outputs of 64 experts, top-6, nothing dropped. Cancelling: a token's experts return +v, -v, +v ...
    except for 5 %, so that an error is large relative to the small remainder.
    """
    B, T, K, D, E, C = 2, 256, 6, 64, 64, 256
    g = torch.Generator().manual_seed(7)
    scores, expert = torch.rand(B, T, E, generator=g).topk(K, -1)
    weights = scores / scores.sum(-1, keepdim=True)
    values = torch.randn(B, T, K, D, generator=g)
    if kind == "cancelling":
        sign = torch.tensor([1.0, -1.0] * (K // 2)).unsqueeze(1)
        values = torch.randn(B, T, 1, D, generator=g) * sign + 0.05 * values
        weights = torch.full_like(weights, 1 / K)
    _, slot, overflow = moe_dispatch(torch.zeros(B, T, 1), expert, E, C)
    assert int(overflow) == 0
    y = torch.zeros(E, B * C, D)
    y[expert, torch.arange(B).view(B, 1, 1) * C + slot] = values
    return *(t.to(device) for t in (y.bfloat16(), expert, slot, weights)), C


@lanes("cpu", "h200")
@pytest.mark.parametrize("kind", ["random", "cancelling"])
def test_error_before_the_cast_is_that_of_fp32(lane: Lane, kind: str, row) -> None:
    y, expert, slot, weights, bucket = inputs = routed(kind, lane.device)
    oracle = moe_combine_naive(*doubled(inputs))
    found = moe_combine(*inputs, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    # Emulated, since index_add over bf16 on the CPU adds in fp32 inside and so hides the fault.
    wide = y.float()
    wrong = {
        "bf16 weights": moe_combine_naive(wide, expert, slot, weights.bfloat16(), bucket),
        "bf16 products": moe_combine_naive(*inputs, total=torch.float32),
        "bf16 sum": moe_combine_naive(wide, expert, slot, weights, bucket, total=torch.bfloat16),
    }
    errors = {name: relative(out, oracle) for name, out in wrong.items()}
    missed = [name for name, wrong_by in errors.items() if wrong_by < 100 * BOUND]
    assert not missed
    row.bound(
        f"kernels/moe_combine-{lane.name}-{kind}/error_before_cast", relative(found, oracle), "ratio",
        at_most=BOUND, rule="C33", seen=found.numel(),
        evidence=[f"{name}: {wrong_by:.1e}" for name, wrong_by in errors.items()],
    )  # fmt: skip


@lanes("cpu")
def test_graph_has_fp32_product_and_accumulator(lane: Lane, row) -> None:
    def narrow(combined: Callable[..., Tensor]) -> tuple[list[str], list[str]]:
        """Return the floating-point multiplications and sums of the traced graph: all of them, and those below fp32."""
        *tensors, bucket = combine.make_inputs(dtype=torch.bfloat16)
        graph = make_fx(lambda *t: combined(*t, bucket))(*tensors).graph
        kinds = ("aten.mul", "aten.index_add", "aten.index_put", "aten.scatter", "aten.add", "aten.sum")
        calls = [n for n in graph.nodes if str(n.target).startswith(kinds)]
        values = [(str(n.target), n.meta["val"].dtype) for n in calls if n.meta["val"].is_floating_point()]
        return [name for name, _ in values], [name for name, dtype in values if dtype != torch.float32]

    every, low = narrow(moe_combine_eager)
    row.count("kernels/moe_combine-graph/narrow_accumulators", low, expected=0, rule="C33", seen=every)
    assert every == ["aten.mul.Tensor", "aten.index_add.default"]
    assert not low
    assert narrow(moe_combine_naive)[1]
    assert narrow(lambda *t: moe_combine_naive(*t, total=torch.float32))[1]


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), C=st.sampled_from([1, 3]))
def test_dropped_assignment_adds_nothing(lane: Lane, seed: int, C: int) -> None:
    """The row that is read in its place (slot 0) is inf, and so are all rows without a token."""
    y, expert, slot, weights, _ = combine.make_inputs(C=C, seed=seed, device=lane.device)
    dropped = slot < 0
    assert dropped.any()
    without = moe_combine(y, expert, slot, weights.masked_fill(dropped, 0), C)
    assert torch.equal(moe_combine(y, expert, slot, weights, C), without)
    unassigned = expert.where(~dropped, -1)  # a null assignment, which never belonged to an expert
    both = (gradients(moe_combine, y, ids, slot, weights, C) for ids in (unassigned, expert))
    assert all(map(torch.equal, *both))
    y[:, ::C] = torch.inf
    untouched = (slot != 0).all(-1)
    assert torch.equal(moe_combine(y, expert, slot, weights, C)[untouched], without[untouched])
    grad_y, grad_weights = gradients(moe_combine, y, expert, slot, weights, C)[1:]
    assert (grad_weights[dropped] == 0).all()
    used = torch.zeros(y.shape[:2], dtype=torch.bool, device=lane.device)
    first = torch.arange(2, device=lane.device).view(2, 1, 1) * C
    used[expert[~dropped], (first + slot)[~dropped]] = True
    assert torch.equal((grad_y != 0).any(-1), used)


@lanes("cpu", "h200")
def test_output_is_cast_once_at_the_end(lane: Lane) -> None:
    inputs = combine.make_inputs(dtype=torch.bfloat16, device=lane.device)
    wide = moe_combine(*inputs, out_dtype=torch.float32)
    assert (wide.bfloat16().float() != wide).any()
    for out_dtype in (None, torch.bfloat16, torch.float16):
        found, expected = moe_combine(*inputs, out_dtype=out_dtype), out_dtype or torch.bfloat16
        assert found.dtype == expected
        # The sum itself may run in another order on a GPU: one rounding step of the narrow type at most.
        torch.testing.assert_close(found.float(), wide.to(expected).float(), rtol=2**-7, atol=1e-6)
    for weights in (None, torch.float32):
        inputs = combine.make_inputs(dtype=torch.float64, weights_dtype=weights)
        assert moe_combine(*inputs).dtype == torch.float64


# grouped_gemm.


def three(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor, form=grouped_gemm) -> list[Tensor]:
    """Return y, dx, dweight for this dy."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = form(*leaves, counts)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@lanes("cpu", "h200")
def test_bucket_compiles_to_one_graph_for_every_routing(lane: Lane) -> None:
    counts = (5, 0, 17, 8), (0, 32, 1, 0), (9, 9, 9, 9)
    batches = [gemm.make_inputs(each, device=lane.device) for each in counts]
    padded = partial(grouped_gemm, impl="padded", bucket=32)
    # A batched product of other shapes may be summed in another order.
    report = check_compiled(padded, train, batches, op="grouped_gemm", calls=0, dynamic=(0,), tolerance=1e-12)
    assert report.unique_graphs == 1
    with host_syncs() as tally:
        train(padded, batches[0])
    assert tally["syncs"] == 0
    assert tally["aten::bmm"] == 3


@lanes("h200")
def test_reads_no_value_on_the_host(lane: Lane) -> None:
    inputs = gemm.make_inputs(D_in=64, D_out=128, dtype=torch.bfloat16, device=lane.device)
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
def test_grouped_gemm_equals_the_loop_for_every_routing(
    lane: Lane, seed: int, counts: list[int], spare: int
) -> None:
    """Unassigned rows may hold anything: their results are zero, and they affect nothing else."""
    made = gemm.make_inputs(counts, spare=spare, dtype=torch.float32, seed=seed, device=lane.device)
    x, weight, counts = made
    dy = torch.randn(len(x), 16, generator=torch.Generator().manual_seed(seed)).to(x)
    used = int(counts.sum())
    plain = three(x, weight, counts, dy, form=grouped_gemm_naive)
    x[used:], dy[used:] = torch.nan, torch.nan
    for impl in ("op", "padded"):
        found = three(x, weight, counts, dy, form=partial(grouped_gemm, impl=impl))
        for ours, theirs in zip(found, plain):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not any(t.any() for t in (found[0][used:], found[1][used:], found[2][counts == 0]))


@lanes("h200")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("D_out", [128, 256, 384, 896])
def test_wide_and_tall_tiles_equal_the_loop(lane: Lane, D_out: int, dtype: str) -> None:
    """Counts around the sides of both tiles of kernels/grouped_gemm/hopper.py; rows without expert hold nan."""
    counts = (0, 600, 3, 256, 0, 0, 127, 128, 129, 64, 65, 1, 255, 257, 512, 0)
    narrow, rounding = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}[dtype]
    x, weight, sizes = gemm.make_inputs(counts, 640, D_out, spare=37, dtype=narrow, device=lane.device)
    dy = torch.randn(len(x), D_out, generator=torch.Generator().manual_seed(1)).to(x)
    exact = three(*doubled((x, weight, sizes, dy)), form=grouped_gemm_naive)
    used = sum(counts)
    x[used:], dy[used:] = torch.nan, torch.nan
    found = three(x, weight, sizes, dy)
    for ours, theirs in zip(found, exact):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=2**-15 * largest)
    assert not found[0][used:].any()
    assert not found[1][used:].any()


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), counts=routings)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_independent(lane: Lane, dtype: str, seed: int, counts: list[int]) -> None:
    """Permuted with their rows they give the same bits, and so does a single one; on the CPU up to rounding, because
    the product of a matrix at another address may be summed in another order.
    """
    tolerance = {"cuda": 0.0, "cpu": {"fp32": 1e-5, "bf16": 2**-7}[dtype]}[lane.device]
    x, weight, sizes = gemm.make_inputs(counts, 64, 64, dtype=DTYPES[dtype], seed=seed, device=lane.device)
    dy = torch.randn(len(x), 64, generator=torch.Generator().manual_seed(seed)).to(x)
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    starts = sizes.cumsum(0) - sizes
    rows = torch.cat([torch.arange(counts[e]) + int(starts[e]) for e in order]).to(sizes)
    y, dx, dweight = three(x, weight, sizes, dy)
    for chosen, part in ((order, rows), (order[:1], rows[: counts[order[0]]])):
        found = three(x[part], weight[chosen], sizes[chosen], dy[part])
        for ours, theirs in zip(found, (y[part], dx[part], dweight[chosen])):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int32_and_int64_counts_give_same_bits(lane: Lane, dtype: str) -> None:
    x, weight, counts = gemm.make_inputs(D_in=64, D_out=64, dtype=DTYPES[dtype], device=lane.device)
    both = (gradients(grouped_gemm, x, weight, given) for given in (counts.int(), counts))
    assert all(map(torch.equal, *both))


@lanes("cpu", "h200")
def test_row_outside_its_bucket_is_nan(lane: Lane) -> None:
    inputs = gemm.make_inputs(device=lane.device)
    y = grouped_gemm(*inputs, impl="padded", bucket=16)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [21]  # the 17th row of the third expert
    assert not grouped_gemm(*inputs, impl="padded", bucket=32).isnan().any()
    assert [power_of_two_bucket(torch.tensor([0, n])) for n in (0, 1, 2, 3, 16, 17)] == [1, 1, 2, 4, 16, 32]


@lanes("cpu", "h200")
def test_upstream_equals_the_loop(lane: Lane) -> None:
    inputs = gemm.make_inputs((5, 0, 17, 10), 64, 128, spare=0, dtype=torch.bfloat16, device=lane.device)
    plain = gradients(grouped_gemm_naive, *doubled(inputs))
    for ours, exact in zip(gradients(partial(grouped_gemm, impl="upstream"), *inputs), plain):
        assert error(ours, exact)[0] <= 2**-8 * float(exact.abs().max()) + 1e-5


@lanes("cpu")
def test_torch_without_grouped_mm_raises_one_line_error(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "grouped_mm")
    with pytest.raises(ImportError, match=r"^grouped_gemm: .*grouped_mm.*pip install torch==\S+$"):
        grouped_gemm(*gemm.make_inputs(), impl="upstream")
