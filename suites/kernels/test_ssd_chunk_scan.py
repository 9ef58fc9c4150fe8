"""ssd_chunk_scan: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, so the two share the formula and no code
but the helpers for shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels.ssd_chunk_scan import (
    ssd_chunk_scan,
    ssd_chunk_scan_recurrent,
    ssd_chunk_scan_reference,
    ssd_chunk_scan_step,
)
from suites.support.instruments import DynamoWatch
from suites.support.lanes import Lane, lanes

NAMES = ("x", "dt", "A", "Bmat", "Cmat", "D", "doc_ids", "initial_state")
PER_TOKEN = ("x", "dt", "Bmat", "Cmat", "doc_ids")
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]
quick = settings(derandomize=True, max_examples=15, deadline=None)


def problem(
    B=2, T=50, H=4, P=8, N=8, G=2, dtype=torch.float64, device="cpu", seed=0, starts=(0, 13, 14, 40)
) -> Inputs:
    """Random inputs; a document begins at each of `starts` in row 0, three tokens later in the other rows.

    The id goes 5, 1, 5, 1: only the change from one token to the next may count, not the value.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    begins = torch.zeros(B, T, dtype=torch.int32)
    for row in range(B):
        for start in starts:
            if start + 3 * row < T:
                begins[row, start + 3 * row] = 1
    inputs = {
        "x": draw(B, T, H, P).to(dtype),
        "dt": F.softplus(draw(B, T, H)),
        "A": -torch.rand(H, generator=g, dtype=torch.float64) - 0.05,
        "Bmat": draw(B, T, G, N).to(dtype),
        "Cmat": draw(B, T, G, N).to(dtype),
        "D": draw(H),
        "doc_ids": 1 + 4 * (begins.cumsum(1) % 2).int(),
        "initial_state": draw(B, H, P, N),
    }
    wide = torch.promote_types(dtype, torch.float32)
    narrow = {n: t.to(wide) if n in ("dt", "A", "D", "initial_state") else t for n, t in inputs.items()}
    return {n: t.to(device) for n, t in narrow.items()}


def doubled(inputs: Inputs) -> Inputs:
    """The same numbers in fp64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def cut(inputs: Inputs, tokens: slice, state: Tensor | None) -> Inputs:
    """Some of the tokens, from a given state."""
    part = {n: t[:, tokens] if n in PER_TOKEN else t for n, t in inputs.items()}
    return part | {"initial_state": state}


def gradients(scan: Scan, inputs: Inputs, **options: object) -> Inputs:
    """Gradients of a fixed random weighting of y and of the final state, by name."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    y, final = scan(**leaves, **options)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in (y, final)]
    wanted = [leaves[n] for n in FLOATS]
    found = torch.autograd.grad((y, final), wanted, weights, allow_unused=True, materialize_grads=True)
    return dict(zip(FLOATS, found))


def error(found: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Largest and RMS difference."""
    difference = (found.double() - oracle.double()).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()


def error_ratio(found: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """How much further from the oracle than the plain formula in the same dtype: the worse of max and RMS."""
    return max(ours / theirs for ours, theirs in zip(error(found, oracle), error(plain, oracle)))


def rounding_bound(inputs: Inputs) -> Tensor:
    """What rounding alone can do to y (B,T,H,P) in fp32.

    y is a sum of products. Each passes at most T + N additions and T more in its exponent s, where an error of
    T u |s| on a weight exp(s) is at most T u of the undecayed one. So (2 T + N + 16) u times the same scan
    over absolute values with no decay and no reset bounds it, 16 being the roundings of single factors.
    """
    sizes = {n: t.abs() if t.is_floating_point() else t * 0 for n, t in doubled(inputs).items()}
    sizes["A"] = sizes["A"] * 0
    T, N = inputs["x"].shape[1], inputs["Bmat"].shape[3]
    return (2 * T + N + 16) * 2**-24 * ssd_chunk_scan_recurrent(**sizes)[0]


def without_carry(chunk_size: int, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Known wrong: each chunk from a zero state, so the quadratic part without the state between chunks."""
    T = inputs["x"].shape[1]
    empty = torch.zeros_like(inputs["initial_state"])
    parts = [
        ssd_chunk_scan_reference(**cut(inputs, slice(t, t + chunk_size), empty), chunk_size=chunk_size)
        for t in range(0, T, chunk_size)
    ]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    inputs = problem(dtype=DTYPES[dtype], device=lane.device)
    oracle = ssd_chunk_scan_recurrent(**doubled(inputs))
    plain = ssd_chunk_scan_recurrent(**inputs)
    found = ssd_chunk_scan(**inputs, chunk_size=16)
    assert found[0].dtype == DTYPES[dtype]
    assert found[1].dtype == torch.float32
    row(
        f"kernels/ssd_chunk_scan-{lane.name}-{dtype}/forward_error_ratio",
        max(error_ratio(*three) for three in zip(found, plain, oracle)),
        unit="ratio",
        witness=oracle[0].numel(),
        at_most=2.0,
        rule="C36",
        evidence=[f"y max, rms error: {error(found[0], oracle[0])}, plain: {error(plain[0], oracle[0])}"],
    )


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_as_close_to_the_oracle_as_autograd_of_the_recurrence(lane: Lane, dtype: str, row):
    inputs = problem(dtype=DTYPES[dtype], device=lane.device)
    oracle = gradients(ssd_chunk_scan_recurrent, doubled(inputs))
    plain = gradients(ssd_chunk_scan_recurrent, inputs)
    found = gradients(ssd_chunk_scan, inputs, chunk_size=16)
    assert {n: g.dtype for n, g in found.items()} == {n: inputs[n].dtype for n in FLOATS}
    ratios = {n: error_ratio(found[n], plain[n], oracle[n]) for n in FLOATS}
    row(
        f"kernels/ssd_chunk_scan-{lane.name}-{dtype}/gradient_error_ratio",
        max(ratios.values()),
        unit="ratio",
        witness=sum(g.numel() for g in oracle.values()),
        at_most=2.0,
        rule="C36",
        evidence=[f"{n}: {ratio:.3f}" for n, ratio in ratios.items()],
    )


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    oracle, _ = ssd_chunk_scan_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
        assert ((y - oracle).abs() <= bound).all()
    wrong, _ = without_carry(16, **inputs)
    assert ((wrong - oracle).abs() > bound).float().mean() > 0.3
    unreset, _ = ssd_chunk_scan(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).float().mean() > 0.3


@lanes("cpu")
@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_gradcheck(lane: Lane, chunk_size: int):
    inputs = problem(B=2, T=7, H=2, P=2, N=3, G=1, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    assert torch.autograd.gradcheck(lambda *t: ssd_chunk_scan(*t, chunk_size=chunk_size), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = problem(device=lane.device)
    found = gradients(ssd_chunk_scan, inputs, chunk_size=chunk_size)
    recurrence = gradients(ssd_chunk_scan_recurrent, inputs)
    chunked = gradients(ssd_chunk_scan, inputs, chunk_size=chunk_size, impl="reference")
    for name in FLOATS:
        torch.testing.assert_close(found[name], recurrence[name], rtol=1e-11, atol=1e-11, msg=name)
        torch.testing.assert_close(found[name], chunked[name], rtol=1e-11, atol=1e-11, msg=name)
    wrong = gradients(partial(without_carry, 16), inputs)
    assert all((wrong[n] - recurrence[n]).abs().max() > 1e-2 for n in FLOATS if n != "D")


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = problem(B=2, T=9, H=4, P=3, N=5, G=2, starts=(4,), dtype=torch.float32, device=lane.device)
    # Every tensor non-contiguous: the op may rely on no layout, and its results may have none but the canonical.
    strided = [t.repeat_interleave(2, -1)[..., ::2] for t in inputs.values()]
    leaves = [t.requires_grad_(t.is_floating_point()) for t in strided]
    torch.library.opcheck(torch.ops.bumpgate.ssd_chunk_scan_fwd, (*leaves, 4))
    y, final = torch.ops.bumpgate.ssd_chunk_scan_fwd(*inputs.values(), 4)
    detached = [t.detach() for t in strided]
    cotangents = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (y, final)]
    torch.library.opcheck(torch.ops.bumpgate.ssd_chunk_scan_bwd, (*detached, 4, *cotangents))
    for op, arguments in (
        (torch.ops.bumpgate.ssd_chunk_scan_fwd, (*detached, 4)),
        (torch.ops.bumpgate.ssd_chunk_scan_bwd, (*detached, 4, *cotangents)),
    ):
        real = op(*arguments)
        fake = op(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [
            (t.shape, t.stride(), t.dtype) for t in real
        ]


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    with DynamoWatch() as watch:
        scan = torch.compile(ssd_chunk_scan, fullgraph=True, backend=watch.backend("aot_eager"))
        for B in (2, 3, 5):
            inputs = problem(B=B, T=20, dtype=torch.float32, device=lane.device)
            for name in (*PER_TOKEN, "initial_state"):
                torch._dynamo.maybe_mark_dynamic(inputs[name], 0)
            eager = gradients(ssd_chunk_scan, inputs)
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                compiled = gradients(scan, inputs)
            ran = {event.key: event.count for event in trace.key_averages()}
            assert ran["bumpgate::ssd_chunk_scan_fwd"] == ran["bumpgate::ssd_chunk_scan_bwd"] == 1
            assert all(torch.equal(eager[n], compiled[n]) for n in FLOATS)
    assert [g.operators.count("bumpgate.ssd_chunk_scan_fwd") for g in watch.report.graphs] == [1]
