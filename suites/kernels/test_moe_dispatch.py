"""moe_dispatch against a loop over assignments: placement bitwise, gradient, compilation, documented guarantees.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch, moe_dispatch_backward_eager
from kernels.moe_dispatch.naive import moe_dispatch_naive
from suites.ops.moe_dispatch import E, make_inputs
from suites.support.comparison import DTYPES, gradients, random_weights
from suites.support.custom_ops import check_compiled
from suites.support.instruments import host_syncs
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)
sizes = {
    "seed": st.integers(0, 99),
    "B": st.integers(1, 3),
    "T": st.integers(1, 17),
    "K": st.integers(1, 4),
    "C": st.integers(1, 8),
}


def gradient(dispatch, x: Tensor, expert: Tensor, bucket: int) -> Tensor:
    """Return the gradient of x, for a fixed random weighting of `padded`."""
    return gradients(dispatch, x, expert, E, bucket)[-1]


def gradient_by_loop(x: Tensor, expert: Tensor, bucket: int) -> Tensor:
    """Compute the same, one addition after the other in the dtype of x: the plain formula."""
    padded, slot, _ = moe_dispatch_naive(x, expert, E, bucket)
    (weighting,) = random_weights([padded])
    dx = torch.zeros_like(x)
    for b, t, k in (slot >= 0).nonzero().tolist():
        dx[b, t] += weighting[expert[b, t, k], b * bucket + slot[b, t, k]]
    return dx


@lanes("cpu", "h200")
def test_every_token_is_placed_bit_by_bit(lane: Lane, row):
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
        f"kernels/moe_dispatch-{lane.name}/misplaced_rows",
        wrong,
        unit="rows",
        expected=0,
        rule="C36",
        seen=rows,
        evidence=[f"dropped, by bucket: {dropped}"],
    )


@lanes("cpu", "h200")
@quick
@given(**sizes)
def test_equals_the_loop(lane: Lane, seed: int, B: int, T: int, K: int, C: int):
    x, expert = make_inputs(B, T, K, seed=seed, device=lane.device)
    repeated = expert[..., :1].expand(B, T, K)  # the same expert K times is a valid routing, too
    some_null = expert.where(expert != 1, -1)
    for ids in (expert, repeated, some_null, torch.full_like(expert, -1)):
        expected = moe_dispatch_naive(x, ids, E, C)
        for impl in ("op", "eager"):
            for ours, theirs in zip(moe_dispatch(x, ids, E, C, impl=impl), expected):
                assert torch.equal(ours, theirs)


@lanes("cpu")
def test_wrong_placements_differ_from_the_loop(lane: Lane):
    x, expert = make_inputs()
    padded, slot, overflow = moe_dispatch_naive(x, expert, E, 4)

    def late_first() -> tuple[Tensor, ...]:
        return moe_dispatch(x.flip(1), expert.flip(1), E, 4)

    def k_major() -> tuple[Tensor, ...]:
        found, place, dropped = moe_dispatch(
            x.repeat(1, 3, 1), expert.transpose(1, 2).reshape(2, -1, 1), E, 4
        )
        return found, place.reshape(2, 3, 17).transpose(1, 2), dropped

    assert not torch.equal(late_first()[0], padded)
    assert not torch.equal(k_major()[1], slot)
    assert torch.equal(k_major()[2], overflow)
    shared = moe_dispatch(
        x.reshape(1, 34, 4), expert.reshape(1, 34, 3), E, 8
    )  # one group for the whole batch
    assert not torch.equal(shared[0], padded)


@lanes("cpu")
def test_backward_graph_has_an_fp32_sum(lane: Lane):
    """Read from the graph: a bf16 sum in torch is fp32 inside, so that the values cannot show it."""
    x, expert = make_inputs(dtype=torch.bfloat16)
    padded, slot, _ = moe_dispatch(x, expert, E, 4)
    graph = make_fx(lambda *t: moe_dispatch_backward_eager(*t, 4))(padded, expert, slot).graph
    sums = [n.meta["val"].dtype for n in graph.nodes if str(n.target).startswith("aten.sum")]
    assert sums == [torch.float32]


@lanes("cpu", "h200")
@pytest.mark.parametrize("bucket", [2, 16])
def test_gradient_equals_autograd_of_the_reference_and_the_loop(lane: Lane, bucket: int):
    x, expert = make_inputs(dtype=torch.float64, device=lane.device)
    found = gradient(moe_dispatch, x, expert, bucket)
    torch.testing.assert_close(found, gradient_by_loop(x, expert, bucket), rtol=1e-13, atol=1e-13)
    reference = gradient(partial(moe_dispatch, impl="eager"), x, expert, bucket)
    torch.testing.assert_close(found, reference, rtol=1e-13, atol=1e-13)
    assert (found == 0).all(-1).any() == (bucket == 2)  # a token that lost all its slots has no gradient


@lanes("cpu", "h200")
@pytest.mark.parametrize("impl", ["op", "eager"])
def test_one_graph_for_every_batch_and_every_routing(lane: Lane, impl: str, row, canaries):
    def train(dispatch, inputs):
        return gradients(dispatch, *inputs, E, 4)

    canaries("graphs")
    batches = [make_inputs(B=B, seed=seed, device=lane.device) for B in (2, 8, 32) for seed in (0, 1)]
    report = check_compiled(
        partial(moe_dispatch, impl=impl),
        train,
        batches,
        op="moe_dispatch",
        calls=int(impl == "op"),
        dynamic=(0, 1),
    )
    row.count(
        f"kernels/moe_dispatch-{lane.name}-{impl}/unique_graphs",
        report.unique_graphs,
        unit="graphs",
        expected=1,
        rule="C12",
        seen=len(batches),
        evidence=[f"{g.ops} operators" for g in report.graphs],
    )


@lanes("cpu")
def test_reads_no_value_on_the_host(lane: Lane):
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
@given(**sizes)
def test_permuting_experts_permutes_their_buckets(lane: Lane, seed: int, B: int, T: int, K: int, C: int):
    x, expert = make_inputs(B, T, K, seed=seed, device=lane.device)
    padded, slot, overflow = moe_dispatch(x, expert, E, C)
    name = torch.randperm(E, generator=torch.Generator().manual_seed(seed)).to(lane.device)
    renamed, new_slot, new_overflow = moe_dispatch(x, name[expert], E, C)
    assert torch.equal(renamed[name], padded)
    assert torch.equal(new_slot, slot)
    assert torch.equal(new_overflow, overflow)


@lanes("cpu", "h200")
@quick
@given(**sizes)
def test_overflow_counts_dropped_assignments(lane: Lane, seed: int, B: int, T: int, K: int, C: int):
    x, expert = make_inputs(B, T, K, seed=seed, device=lane.device)
    counts = torch.stack([ids.flatten().bincount(minlength=E) for ids in expert])  # (B,E)
    _, slot, overflow = moe_dispatch(x, expert, E, C)
    assert int(overflow) == int((counts - C).clamp(min=0).sum()) == int((slot < 0).sum())
    for bucket, full in ((int(counts.max()), False), (int(counts.max()) - 1, True)):
        if bucket:
            assert (int(moe_dispatch(x, expert, E, bucket)[2]) > 0) == full


@lanes("cpu", "h200")
@quick
@given(**sizes)
def test_batch_rows_are_independent(lane: Lane, seed: int, B: int, T: int, K: int, C: int):
    x, expert = make_inputs(B, T, K, seed=seed, device=lane.device)
    padded, slot, overflow = moe_dispatch(x, expert, E, C)
    alone = [moe_dispatch(x[b : b + 1], expert[b : b + 1], E, C) for b in range(B)]
    assert torch.equal(padded, torch.cat([p for p, _, _ in alone], 1))
    assert torch.equal(slot, torch.cat([s for _, s, _ in alone], 0))
    assert int(overflow) == sum(int(o) for _, _, o in alone)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), B=st.integers(1, 3), T=st.integers(1, 17), K=st.sampled_from([1, 2, 4]))
def test_dispatch_then_combine_is_the_identity(lane: Lane, seed: int, B: int, T: int, K: int):
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
