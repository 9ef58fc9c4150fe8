"""moe_combine against a loop over the K assignments: value, gradient, compilation; product and sum are fp32.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots an expert and a sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from kernels.moe_combine import moe_combine, moe_combine_reference
from kernels.moe_dispatch import moe_dispatch
from suites.support.instruments import DynamoWatch
from suites.support.lanes import Lane, lanes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOUND = (
    1e-5  # on the fp32 output before its cast: right reads 6e-8 (random) and 6e-7 (cancelling), wrong 2e-3 up
)
quick = settings(derandomize=True, max_examples=15, deadline=None)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]


def problem(
    B=2, T=24, K=3, D=8, E=6, C=8, dtype=torch.float64, device="cpu", seed=0, weights_dtype=None
) -> Inputs:
    """y (E,B*C,D) with noise in unused rows too, expert, slot, weights and bucket; a small C drops some."""
    g = torch.Generator().manual_seed(seed)
    scores, expert = torch.rand(B, T, E, generator=g).sub(0.1 * torch.arange(E)).topk(K, -1)
    weights = torch.softmax(scores.double(), -1).to(
        weights_dtype or torch.promote_types(dtype, torch.float32)
    )
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    _, slot, _ = moe_dispatch(torch.zeros(B, T, 1), expert, E, C)
    return *(t.to(device) for t in (y, expert, slot, weights)), C


def by_loop(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, total: torch.dtype | None = None
) -> Tensor:
    """The plain formula: products in the dtype of y, each addition rounds to `total` (y.dtype if None)."""
    B, T, K = expert.shape
    first = torch.arange(B, device=y.device).unsqueeze(1) * bucket
    out = y.new_zeros((B, T, y.shape[2]), dtype=total)
    for k in range(K):
        rows = y[expert[..., k], first + slot[..., k].clamp(min=0)]
        rows = torch.where(slot[..., k, None] < 0, 0, rows)
        out = out + (weights[..., k, None].to(y.dtype) * rows).to(out.dtype)
    return out


def gradients(combine: Callable[..., Tensor], *inputs, **options) -> list[Tensor]:
    """The output, and the gradients of y and weights of a fixed random weighting of it."""
    y, expert, slot, weights, bucket = inputs
    y, weights = (t.detach().clone().requires_grad_() for t in (y, weights))
    out = combine(y, expert, slot, weights, bucket, **options)
    g = torch.Generator().manual_seed(1)
    weighting = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, (y, weights), weighting)]


def doubled(inputs: Inputs) -> Inputs:
    y, expert, slot, weights, bucket = inputs
    return y.double(), expert, slot, weights.double(), bucket


def error(found: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Largest and RMS difference."""
    difference = (found.double() - oracle.double()).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()


def error_ratio(found: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """How much further from the oracle than the plain formula in the same dtype: the worse of max and RMS."""
    return max(ours / theirs for ours, theirs in zip(error(found, oracle), error(plain, oracle)))


def relative(found: Tensor, oracle: Tensor) -> float:
    """Frobenius norm of the difference, relative."""
    return float((found.double() - oracle).norm() / oracle.norm())


def routed(kind: str, device: str) -> Inputs:
    """bf16 outputs of 64 experts, top-6, nothing dropped. Cancelling: a token's experts return +v, -v, +v ...
    but for 5 %, so that an error shows against the little that is left."""
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
    oracle = by_loop(*doubled(inputs))
    found = moe_combine(*inputs, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    # Emulated, since index_add over bf16 on the CPU adds in fp32 inside and so hides the fault.
    wide = y.float()
    wrong = {
        "bf16 weights": by_loop(wide, expert, slot, weights.bfloat16(), bucket),
        "bf16 products": by_loop(*inputs, total=torch.float32),
        "bf16 sum": by_loop(wide, expert, slot, weights, bucket, total=torch.bfloat16),
    }
    errors = {name: relative(out, oracle) for name, out in wrong.items()}
    missed = [name for name, wrong_by in errors.items() if wrong_by < 100 * BOUND]
    assert not missed
    row(
        f"kernels/moe_combine-{lane.name}-{kind}/error_before_cast",
        relative(found, oracle),
        unit="ratio",
        witness=found.numel(),
        at_most=BOUND,
        rule="C33",
        evidence=[f"{name}: {wrong_by:.1e}" for name, wrong_by in errors.items()],
    )


@lanes("cpu")
def test_the_graph_shows_fp32_product_and_accumulator(lane: Lane):
    def narrow(combine: Callable[..., Tensor]) -> tuple[list[str], list[str]]:
        """The floating-point multiplications and sums of the traced graph: all of them, those below fp32."""
        *tensors, bucket = problem(dtype=torch.bfloat16)
        graph = make_fx(lambda *t: combine(*t, bucket))(*tensors).graph
        kinds = ("aten.mul", "aten.index_add", "aten.index_put", "aten.scatter", "aten.add", "aten.sum")
        calls = [n for n in graph.nodes if str(n.target).startswith(kinds)]
        values = [(str(n.target), n.meta["val"].dtype) for n in calls if n.meta["val"].is_floating_point()]
        return [name for name, _ in values], [name for name, dtype in values if dtype != torch.float32]

    every, low = narrow(moe_combine_reference)
    assert every == ["aten.mul.Tensor", "aten.index_add.default"]
    assert not low
    assert narrow(by_loop)[1]
    assert narrow(lambda *t: by_loop(*t, total=torch.float32))[1]


@lanes("cpu", "h200")
@pytest.mark.parametrize("bucket", [3, 24])
def test_fp64_equals_the_loop(lane: Lane, bucket: int):
    inputs = problem(C=bucket, device=lane.device)
    assert (inputs[2] < 0).any() == (bucket == 3)
    plain = gradients(by_loop, *inputs)
    for impl in ("op", "reference"):
        for ours, theirs in zip(gradients(partial(moe_combine, impl=impl), *inputs), plain):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_the_plain_formula(lane: Lane, dtype: str, row):
    inputs = problem(T=64, K=5, D=32, C=64, dtype=DTYPES[dtype], device=lane.device)
    oracle = gradients(by_loop, *doubled(inputs))
    plain = gradients(by_loop, *inputs)
    found = gradients(moe_combine, *inputs)
    assert [t.dtype for t in found] == [DTYPES[dtype], DTYPES[dtype], torch.float32]
    # The weighting of the output is rounded to its dtype, so the oracle's gradients take the rounded one.
    y, expert, slot, weights, bucket = doubled(inputs)
    weighting = torch.randn(oracle[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (y, weights)]
    out = by_loop(leaves[0], expert, slot, leaves[1], bucket)
    oracle[1:] = torch.autograd.grad(out, leaves, weighting.to(found[0]).double())
    ratios = [error_ratio(*three) for three in zip(found, plain, oracle)]
    row(
        f"kernels/moe_combine-{lane.name}-{dtype}/error_ratio",
        max(ratios),
        unit="ratio",
        witness=sum(t.numel() for t in oracle),
        at_most=2.0,
        rule="C36",
        evidence=[
            f"{name}: {ratio:.3f}" for name, ratio in zip(("output", "grad y", "grad weights"), ratios)
        ],
    )


@lanes("cpu")
@pytest.mark.parametrize("bucket", [1, 4])
def test_gradcheck(lane: Lane, bucket: int):
    y, expert, slot, weights, _ = problem(T=4, K=2, D=2, E=3, C=bucket)
    leaves = [t.requires_grad_() for t in (y, weights)]
    assert torch.autograd.gradcheck(lambda y, w: moe_combine(y, expert, slot, w, bucket), leaves)


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    *tensors, bucket = problem(T=6, C=2, dtype=torch.float32, device=lane.device)
    # Every tensor non-contiguous: the op may rely on no layout, and its results have the canonical one.
    y, expert, slot, weights = (t.repeat_interleave(2, -1)[..., ::2] for t in tensors)
    forward = (y, expert, slot, weights, bucket, torch.bfloat16)
    out = torch.ops.bumpgate.moe_combine_fwd(*forward)
    backward = (y, expert, slot, weights, bucket, out.transpose(0, 2).contiguous().transpose(0, 2))
    leaves = (y.clone().requires_grad_(), expert, slot, weights.clone().requires_grad_(), bucket)
    torch.library.opcheck(torch.ops.bumpgate.moe_combine_fwd, (*leaves, torch.float32))
    torch.library.opcheck(torch.ops.bumpgate.moe_combine_bwd, backward)
    for op, arguments in (
        (torch.ops.bumpgate.moe_combine_fwd, forward),
        (torch.ops.bumpgate.moe_combine_bwd, backward),
    ):
        real = op(*arguments)
        fake = op(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments))
        real, fake = ([t] if isinstance(t, Tensor) else t for t in (real, fake))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [
            (t.shape, t.stride(), t.dtype) for t in real
        ]


@lanes("cpu", "h200")
@pytest.mark.parametrize("impl", ["op", "reference"])
def test_one_graph_serves_every_batch_there_and_back(lane: Lane, impl: str):
    """Dispatch, one product an expert, combine: the way through an E block."""

    def there_and_back(x: Tensor, expert: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
        padded, slot, _ = moe_dispatch(x, expert, 6, 8, impl=impl)
        return moe_combine(torch.bmm(padded, matrix), expert, slot, weights, 8, impl=impl)

    def train(layer: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        x, expert, weights, matrix = inputs
        leaves = [t.clone().requires_grad_() for t in (x, weights, matrix)]
        for t in (leaves[0], leaves[1], expert):
            torch._dynamo.mark_dynamic(t, 0)
        out = layer(leaves[0], expert, *leaves[1:])
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    g = torch.Generator(device=lane.device).manual_seed(0)
    with DynamoWatch() as watch:
        compiled = torch.compile(there_and_back, fullgraph=True, backend=watch.backend("aot_eager"))
        for B in (2, 8, 32):
            _, expert, _, weights, _ = problem(B=B, dtype=torch.float32, device=lane.device)
            x = torch.randn(B, 24, 8, generator=g, device=lane.device)
            matrix = torch.randn(6, 8, 8, generator=g, device=lane.device)
            inputs = (x, expert, weights, matrix)
            for ours, theirs in zip(train(compiled, *inputs), train(there_and_back, *inputs)):
                # Bit by bit where no atomics add: the plain reference on a GPU may sum in another order.
                exact = impl == "op" and lane.device == "cpu"
                torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train(compiled, *inputs)
    ran = {event.key: event.count for event in trace.key_averages()}
    opaque = [ran.get(f"bumpgate::moe_combine_{way}", 0) for way in ("fwd", "bwd")]
    assert opaque == ([1, 1] if impl == "op" else [0, 0])
    assert watch.report.unique_graphs == 1


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
    inputs = problem(B, T, K, C=C, seed=seed, device=lane.device)
    torch.testing.assert_close(moe_combine(*inputs), by_loop(*inputs), rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), C=st.sampled_from([1, 3]))
def test_a_dropped_assignment_adds_nothing(lane: Lane, seed: int, C: int):
    """The row that stands in for it (slot 0) is inf, and so are all rows that no token has."""
    y, expert, slot, weights, _ = problem(C=C, seed=seed, device=lane.device)
    dropped = slot < 0
    assert dropped.any()
    without = moe_combine(y, expert, slot, weights.masked_fill(dropped, 0), C)
    assert torch.equal(moe_combine(y, expert, slot, weights, C), without)
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
def test_rows_of_a_batch_do_not_touch(lane: Lane, seed: int, B: int):
    y, expert, slot, weights, C = problem(B, dtype=torch.float32, seed=seed, device=lane.device)
    whole = moe_combine(y, expert, slot, weights, C)
    for b, part in enumerate(y.split(C, 1)):
        alone = moe_combine(part, *(t[b : b + 1] for t in (expert, slot, weights)), C)
        torch.testing.assert_close(whole[b : b + 1], alone, rtol=1e-6, atol=1e-6)


@lanes("cpu", "h200")
def test_the_cast_comes_last(lane: Lane):
    inputs = problem(dtype=torch.bfloat16, device=lane.device)
    wide = moe_combine(*inputs, out_dtype=torch.float32)
    assert (wide.bfloat16().float() != wide).any()
    for out_dtype, wanted in (
        (None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        found = moe_combine(*inputs, out_dtype=out_dtype)
        assert found.dtype == wanted
        # The sum itself may run in another order on a GPU: one rounding step of the narrow type at most.
        torch.testing.assert_close(found.float(), wide.to(wanted).float(), rtol=2**-7, atol=1e-6)
    assert moe_combine(*problem(dtype=torch.float64)).dtype == torch.float64
    assert moe_combine(*problem(dtype=torch.float64, weights_dtype=torch.float32)).dtype == torch.float64


@lanes("cpu")
def test_bad_input_is_one_clear_line(lane: Lane):
    y, expert, slot, weights, C = problem(dtype=torch.bfloat16)
    bad = [
        ((y, expert, slot, weights.bfloat16(), C), {}, "combine weights stay fp32"),
        ((y, expert, slot, weights.half(), C), {}, "combine weights stay fp32"),
        ((y[0], expert, slot, weights, C), {}, "2-d"),
        ((y, expert, slot, weights, C - 1), {}, "rows an expert"),
        ((y, expert, slot[1:], weights, C), {}, "slot has shape"),
        ((y, expert, slot, weights[..., 1:], C), {}, "weights has shape"),
        ((y, expert, slot.int(), weights, C), {}, "int64"),
        ((y.int(), expert, slot, weights, C), {"out_dtype": torch.float32}, "y must be floating point"),
        ((y, expert, slot, weights, C), {"out_dtype": torch.int32}, "out must be floating point"),
        ((y, expert, slot, weights, C), {"impl": "fast"}, "choices are"),
    ]
    for arguments, options, words in bad:
        with pytest.raises(ValueError, match=words) as caught:
            moe_combine(*arguments, **options)
        assert "\n" not in str(caught.value)
