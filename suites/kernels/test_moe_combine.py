"""moe_combine against a loop over the K assignments: value, gradient, compilation; product and sum are fp32.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.moe_combine import moe_combine, moe_combine_eager
from kernels.moe_combine.naive import moe_combine_naive
from kernels.moe_dispatch import moe_dispatch
from suites.ops.moe_combine import Inputs, make_inputs
from suites.support.comparison import (
    doubled,
    gradients,
)
from suites.support.custom_ops import check_compiled
from suites.support.lanes import Lane, lanes

BOUND = 1e-5  # for the fp32 output before its cast: right reads 6e-8 (random) and 6e-7 (cancelling), wrong 2e-3 up
quick = settings(derandomize=True, max_examples=15, deadline=None)


def relative(found: Tensor, oracle: Tensor) -> float:
    """Return the relative Frobenius norm of the difference."""
    return float((found.double() - oracle).norm() / oracle.norm())


def routed(kind: str, device: str) -> Inputs:
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
def test_error_before_the_cast_is_that_of_fp32(lane: Lane, kind: str, row):
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
        f"kernels/moe_combine-{lane.name}-{kind}/error_before_cast",
        relative(found, oracle),
        "ratio",
        at_most=BOUND,
        rule="C33",
        seen=found.numel(),
        evidence=[f"{name}: {wrong_by:.1e}" for name, wrong_by in errors.items()],
    )


@lanes("cpu")
def test_graph_has_fp32_product_and_accumulator(lane: Lane, row):
    def narrow(combine: Callable[..., Tensor]) -> tuple[list[str], list[str]]:
        """Return the floating-point multiplications and sums of the traced graph: all of them, and those below fp32."""
        *tensors, bucket = make_inputs(dtype=torch.bfloat16)
        graph = make_fx(lambda *t: combine(*t, bucket))(*tensors).graph
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
@pytest.mark.parametrize("impl", ["op", "eager"])
def test_dispatch_and_combine_compile_to_one_graph(lane: Lane, impl: str):
    """Dispatch, one product per expert, combine: the path through an E block."""

    def there_and_back(x: Tensor, expert: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
        padded, slot, _ = moe_dispatch(x, expert, 6, 8, impl=impl)
        return moe_combine(torch.bmm(padded, matrix), expert, slot, weights, 8, impl=impl)

    def train(layer, inputs):
        return gradients(layer, *inputs)

    g = torch.Generator(device=lane.device).manual_seed(0)
    batches = []
    for B in (2, 8, 32):
        _, expert, _, weights, _ = make_inputs(B=B, dtype=torch.float32, device=lane.device)
        x, matrix = (
            torch.randn(*shape, generator=g, device=lane.device) for shape in ((B, 24, 8), (6, 8, 8))
        )
        batches.append((x, expert, weights, matrix))
    # Bitwise without atomics: the plain reference on a GPU may sum in another order.
    report = check_compiled(
        there_and_back,
        train,
        batches,
        op="moe_combine",
        calls=int(impl == "op"),
        dynamic=(0, 1, 2),
        tolerance=0.0 if impl == "op" and lane.device == "cpu" else 1e-5,
    )
    assert report.unique_graphs == 1


@lanes("cpu", "h200")
@quick
@given(
    seed=st.integers(0, 99),
    B=st.integers(1, 3),
    T=st.integers(1, 17),
    K=st.integers(1, 6),
    C=st.sampled_from([1, 2, 5, 17]),
)
def test_equals_the_loop(lane: Lane, seed: int, B: int, T: int, K: int, C: int):
    inputs = make_inputs(B, T, K, C=C, seed=seed, device=lane.device)
    torch.testing.assert_close(moe_combine(*inputs), moe_combine_naive(*inputs), rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), C=st.sampled_from([1, 3]))
def test_dropped_assignment_adds_nothing(lane: Lane, seed: int, C: int):
    """The row that is read in its place (slot 0) is inf, and so are all rows without a token."""
    y, expert, slot, weights, _ = make_inputs(C=C, seed=seed, device=lane.device)
    dropped = slot < 0
    assert dropped.any()
    without = moe_combine(y, expert, slot, weights.masked_fill(dropped, 0), C)
    assert torch.equal(moe_combine(y, expert, slot, weights, C), without)
    unassigned = expert.where(~dropped, -1)  # a null assignment, which never belonged to an expert
    for ours, same in zip(
        gradients(moe_combine, y, unassigned, slot, weights, C),
        gradients(moe_combine, y, expert, slot, weights, C),
    ):
        assert torch.equal(ours, same)
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
@quick
@given(seed=st.integers(0, 99), B=st.integers(2, 4))
def test_batch_rows_are_independent(lane: Lane, seed: int, B: int):
    y, expert, slot, weights, C = make_inputs(B, dtype=torch.float32, seed=seed, device=lane.device)
    whole = moe_combine(y, expert, slot, weights, C)
    for b, part in enumerate(y.split(C, 1)):
        alone = moe_combine(part, *(t[b : b + 1] for t in (expert, slot, weights)), C)
        torch.testing.assert_close(whole[b : b + 1], alone, rtol=1e-6, atol=1e-6)


@lanes("cpu", "h200")
def test_output_is_cast_once_at_the_end(lane: Lane):
    inputs = make_inputs(dtype=torch.bfloat16, device=lane.device)
    wide = moe_combine(*inputs, out_dtype=torch.float32)
    assert (wide.bfloat16().float() != wide).any()
    for out_dtype, expected in (
        (None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        found = moe_combine(*inputs, out_dtype=out_dtype)
        assert found.dtype == expected
        # The sum itself may run in another order on a GPU: one rounding step of the narrow type at most.
        torch.testing.assert_close(found.float(), wide.to(expected).float(), rtol=2**-7, atol=1e-6)
    assert moe_combine(*make_inputs(dtype=torch.float64)).dtype == torch.float64
    assert moe_combine(*make_inputs(dtype=torch.float64, weights_dtype=torch.float32)).dtype == torch.float64


@lanes("cpu", "h200")
@pytest.mark.parametrize(("bucket", "dropped"), [(3, True), (24, False)])
def test_small_bucket_drops_assignments(lane: Lane, bucket: int, dropped: bool):
    slot = make_inputs(C=bucket, device=lane.device)[2]
    assert bool((slot < 0).any()) == dropped
