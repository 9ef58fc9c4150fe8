"""ssd_chunk_scan: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is another computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
FWD, BWD = torch.ops.bumpgate.ssd_chunk_scan_fwd, torch.ops.bumpgate.ssd_chunk_scan_bwd
Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]
quick = settings(derandomize=True, max_examples=15, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These sizes gain nothing from threads, and lose tenfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(
    B=2, T=50, H=4, P=8, N=8, G=2, dtype=torch.float64, device="cpu", seed=0, starts=(13, 14, 40)
) -> Inputs:
    """Random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row.

    The ids go 5, 1, 5, 1: a change from one token to the next is what counts, not the value.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    begins = torch.zeros(B, T, dtype=torch.int32)
    for row in range(B):
        begins[row, [start + 3 * row for start in starts if start + 3 * row < T]] = 1
    wide = torch.promote_types(dtype, torch.float32)
    inputs = {
        "x": draw(B, T, H, P).to(dtype),
        "dt": F.softplus(draw(B, T, H)).to(wide),
        "A": (-torch.rand(H, generator=g, dtype=torch.float64) - 0.05).to(wide),
        "Bmat": draw(B, T, G, N).to(dtype),
        "Cmat": draw(B, T, G, N).to(dtype),
        "D": draw(H).to(wide),
        "doc_ids": 5 - 4 * (begins.cumsum(1) % 2).int(),
        "initial_state": draw(B, H, P, N).to(wide),
    }
    return {n: t.to(device) for n, t in inputs.items()}


def doubled(inputs: Inputs) -> Inputs:
    """The same numbers in fp64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def cut(inputs: Inputs, tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    """Some of the tokens, from a given state."""
    return {n: t[:, tokens] if n in PER_TOKEN else t for n, t in inputs.items()} | {"initial_state": state}


def results(scan: Scan, inputs: Inputs) -> Inputs:
    """y, the final state, and the gradients by name of a fixed random weighting of both."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    y, final = scan(**leaves)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in (y, final)]
    wanted = [leaves[n] for n in FLOATS]
    found = torch.autograd.grad((y, final), wanted, weights, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), "final": final.detach(), **dict(zip(FLOATS, found))}


def worst(found: Inputs, oracle: Inputs) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    return max(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def rounding_bound(inputs: Inputs) -> Tensor:
    """What rounding alone can do to y (B,T,H,P) in fp32.

    y is a sum of products. Each passes at most T + N additions, and T more in its exponent s, where an error
    of T u |s| on a weight exp(s) is at most T u of the undecayed one. So (2 T + N + 16) u times the same scan
    over absolute values, with no decay and no reset, bounds it; 16 for the roundings of single factors.
    """
    sizes = {n: t.abs() if t.is_floating_point() else t * 0 for n, t in doubled(inputs).items()}
    T, N = inputs["x"].shape[1], inputs["Bmat"].shape[3]
    return (2 * T + N + 16) * 2**-24 * ssd_chunk_scan_recurrent(**sizes | {"A": sizes["A"] * 0})[0]


def without_carry(chunk_size: int, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Known wrong: each chunk from a zero state, so the quadratic part without the state between chunks."""
    zero = torch.zeros_like(inputs["initial_state"])
    starts = range(0, inputs["x"].shape[1], chunk_size)
    parts = [ssd_chunk_scan_reference(**cut(inputs, slice(t, t + chunk_size), zero)) for t in starts]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    chunked = partial(ssd_chunk_scan, chunk_size=16)
    errors: dict[str, list[list[Tensor]]] = {n: [[], []] for n in ("y", "final", *FLOATS)}
    for seed in range(8):
        inputs = problem(dtype=DTYPES[dtype], device=lane.device, seed=seed)
        oracle = results(ssd_chunk_scan_recurrent, doubled(inputs))
        for side, scan in enumerate((chunked, ssd_chunk_scan_recurrent)):
            for name, found in results(scan, inputs).items():
                assert found.dtype == inputs[{"y": "x", "final": "dt"}.get(name, name)].dtype
                errors[name][side].append((found.double() - oracle[name]).flatten())
    ratios = {}
    for name, sides in errors.items():
        ours, plain = (torch.cat(side) for side in sides)
        ratios[name] = max((ours.abs().max() / plain.abs().max()).item(), (ours.norm() / plain.norm()).item())
    # Twice forward, three times backward, as in flash-attn's tests: a maximum over few entries wanders.
    for metric, names, limit in (("forward", ("y", "final"), 2.0), ("gradient", FLOATS, 3.0)):
        row(
            f"kernels/ssd_chunk_scan-{lane.name}-{dtype}/{metric}_error_ratio",
            max(ratios[n] for n in names),
            unit="ratio",
            witness=sum(e.numel() for n in names for e in errors[n][0]),
            at_most=limit,
            rule="C36",
            evidence=[f"{n}: {ratios[n]:.3f}" for n in names],
        )


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    oracle, _ = ssd_chunk_scan_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must tell a wrong scan from a right one: no state between chunks, and no reset.
    wrong, _ = without_carry(16, **inputs)
    assert ((wrong - oracle).abs() > bound).double().mean() > 0.5
    unreset, _ = ssd_chunk_scan(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.2


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = problem(B=2, T=5, H=2, P=2, N=2, G=1, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    assert torch.autograd.gradcheck(lambda *t: ssd_chunk_scan(*t, chunk_size=2), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = problem(device=lane.device)
    found = results(partial(ssd_chunk_scan, chunk_size=chunk_size), inputs)
    assert worst(found, results(ssd_chunk_scan_recurrent, inputs)) < 1e-13
    assert (
        worst(found, results(partial(ssd_chunk_scan, chunk_size=chunk_size, impl="reference"), inputs))
        < 1e-13
    )
    assert worst(results(partial(without_carry, 16), inputs), found) > 0.1


@lanes("cpu", "h200")
@quick
@given(
    T=st.integers(1, 70),
    chunk_size=st.integers(1, 80),
    G=st.sampled_from([1, 2, 4]),
    start=st.integers(1, 70),
)
def test_any_chunk_size_is_the_recurrence(lane: Lane, T: int, chunk_size: int, G: int, start: int):
    inputs = problem(T=T, G=G, P=3, N=5, starts=(start,), device=lane.device, seed=T)
    found, final = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
    oracle, last = ssd_chunk_scan_recurrent(**inputs)
    assert worst({"y": found, "final": final}, {"y": oracle, "final": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_two_segments_with_carried_state_are_one_run(lane: Lane, T: int, at: float, chunk_size: int):
    split = min(max(1, round(at * T)), T - 1)

    def in_two(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        head = cut(inputs, slice(0, split), inputs["initial_state"])
        y0, state = ssd_chunk_scan(**head, chunk_size=chunk_size)
        # A segment cannot see that its first token begins a document: whoever carries the state zeroes it.
        ids = inputs["doc_ids"]
        state = state * (ids[:, split] == ids[:, split - 1])[:, None, None, None]
        y1, state = ssd_chunk_scan(**cut(inputs, slice(split, T), state), chunk_size=chunk_size)
        return torch.cat((y0, y1), 1), state

    inputs = problem(T=T, P=3, N=5, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert (
        worst(results(in_two, inputs), results(partial(ssd_chunk_scan, chunk_size=chunk_size), inputs))
        < 1e-13
    )


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = problem(T=20, starts=(7,), device=lane.device)
    whole, last = ssd_chunk_scan(**inputs)
    _, state = ssd_chunk_scan(**cut(inputs, slice(0, 19), inputs["initial_state"]))
    tokens = {
        n: inputs[n][:, -1] if n in PER_TOKEN else inputs[n] for n in ("x", "dt", "A", "Bmat", "Cmat", "D")
    }
    y, state = ssd_chunk_scan_step(**tokens, state=state)
    assert worst({"y": y, "state": state}, {"y": whole[:, -1], "state": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 40), chunk_size=st.sampled_from([4, 16, 64]), dtype=st.sampled_from([*DTYPES]))
def test_a_packed_document_is_alone(lane: Lane, length: int, chunk_size: int, dtype: str):
    """[A|B] gives B as B alone gives it, and not a bit of B hangs on what A holds.

    Bit-equal where A fills whole chunks (the same sums in the same order), and in the recurrence always.
    Elsewhere the chunk borders cut B in other places, so its sums are rounded in another order.
    """
    inputs = problem(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length)
    inputs["doc_ids"][:, length:] += 1
    scan = partial(ssd_chunk_scan, chunk_size=chunk_size)
    alone_inputs = cut(inputs, slice(length, None), None)
    alone, alone_final = scan(**alone_inputs)
    packed, packed_final = scan(**inputs)
    if length % chunk_size == 0:
        assert torch.equal(packed[:, length:], alone)
        assert torch.equal(packed_final, alone_final)
    elif dtype == "fp32":
        zero = torch.zeros_like(inputs["initial_state"])
        bound = rounding_bound(alone_inputs | {"initial_state": zero})
        assert ((packed[:, length:] - alone).abs() <= 2 * bound).all()
    recurrence, _ = ssd_chunk_scan_recurrent(**inputs)
    assert torch.equal(recurrence[:, length:], ssd_chunk_scan_recurrent(**alone_inputs)[0])

    leaves = {n: t.detach().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    y, _ = scan(**leaves)
    y[:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in ("x", "dt", "Bmat", "Cmat"))
    assert leaves["initial_state"].grad.count_nonzero() == 0
    assert leaves["x"].grad[:, length:].count_nonzero() > 0

    others = problem(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + 1)
    mixed = {
        n: torch.cat((others[n][:, :length] * 100, t[:, length:]), 1) if n in PER_TOKEN[:-1] else t
        for n, t in inputs.items()
    }
    assert not torch.equal(scan(**mixed)[0][:, :length], packed[:, :length])
    assert torch.equal(scan(**mixed)[0][:, length:], packed[:, length:])
    assert torch.equal(scan(**mixed)[1], packed_final)


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_the_future_does_not_reach_the_past(lane: Lane, T: int, at: float, chunk_size: int):
    now = min(max(1, round(at * T)), T - 1)
    inputs = problem(T=T, P=3, N=5, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
    later = {
        n: torch.cat((t[:, :now], t[:, now:] * 3 + 1), 1) if n in PER_TOKEN else t for n, t in inputs.items()
    }
    changed, _ = ssd_chunk_scan(**later, chunk_size=chunk_size)
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_strong_decay_leaves_finite_and_right_gradients(lane: Lane, chunk_size: int):
    inputs = problem(T=24, dtype=torch.float32, device=lane.device)
    inputs["dt"][:, 5::7] = 3e3
    inputs["A"][0] = -80.0
    found = results(partial(ssd_chunk_scan, chunk_size=chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(ssd_chunk_scan_recurrent, doubled(inputs))) < 1e-5
    # The usual way, exp of a difference of running sums and then a mask, does turn into NaN here.
    decay = (inputs["A"] * inputs["dt"])[0, :, 0].requires_grad_()
    sums = decay.cumsum(0)
    torch.exp(sums[:, None] - sums[None, :]).tril().sum().backward()
    assert decay.grad.isnan().any()


@lanes("cpu", "h200")
def test_autocast_does_not_reach_the_scan(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    plain = results(ssd_chunk_scan, inputs)
    with torch.autocast(lane.device, dtype=torch.bfloat16):
        assert (inputs["Bmat"] @ inputs["Cmat"].mT).dtype == torch.bfloat16
        cast = results(ssd_chunk_scan, inputs)
        inlined, _ = ssd_chunk_scan(**inputs, impl="reference")
    assert all(torch.equal(plain[n], cast[n]) for n in plain)
    assert torch.equal(plain["y"], inlined)


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = problem(B=2, T=9, H=4, P=3, N=5, G=2, starts=(4,), dtype=torch.float32, device=lane.device)
    # No tensor contiguous: the op may rely on no layout, and its results have the canonical one.
    strided = [t.repeat_interleave(2, -1)[..., ::2] for t in inputs.values()]
    cotangents = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in FWD(*strided, 4)]
    for op, arguments in ((FWD, (*strided, 4)), (BWD, (*strided, 4, *cotangents))):
        real = op(*arguments)
        fake = op(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [
            (t.shape, t.stride(), t.dtype) for t in real
        ]
        assert all(t.is_contiguous() for t in real)
        torch.library.opcheck(op, arguments)
    torch.library.opcheck(FWD, (*(t.requires_grad_(t.is_floating_point()) for t in strided), 4))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    with DynamoWatch() as watch:
        scan = torch.compile(ssd_chunk_scan, fullgraph=True, backend=watch.backend("aot_eager"))
        for B in (2, 3, 5):
            inputs = problem(B=B, T=20, dtype=torch.float32, device=lane.device)
            leaves = {n: t.requires_grad_(n in FLOATS) for n, t in inputs.items()}
            for name in (*PER_TOKEN, "initial_state"):
                torch._dynamo.maybe_mark_dynamic(leaves[name], 0)
            sum(t.sum() for t in scan(**leaves)).backward()
            eager, compiled = results(ssd_chunk_scan, inputs), results(scan, inputs)
            assert all(torch.equal(eager[n], compiled[n]) for n in eager)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            results(scan, inputs)
        ran = {event.key: event.count for event in trace.key_averages()}
        assert ran["bumpgate::ssd_chunk_scan_fwd"] == ran["bumpgate::ssd_chunk_scan_bwd"] == 1
    (graph,) = watch.report.graphs
    assert graph.operators.count(str(FWD.default)) == 1

    inlined = partial(ssd_chunk_scan, impl="reference")
    with DynamoWatch() as watch:
        traced = results(torch.compile(inlined, fullgraph=True, backend=watch.backend("aot_eager")), inputs)
    (graph,) = watch.report.graphs
    assert graph.ops > 20
    assert not any("bumpgate" in operator for operator in graph.operators)
    assert worst(traced, compiled) < 1e-5


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"x": i["x"][0]}, "x must be"),
    "groups": (lambda i: {"Bmat": i["Bmat"][:, :, [0, 1, 0]]}, "H divisible by G"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "A": (lambda i: {"A": i["A"][:-1]}, "A has shape"),
    "state": (lambda i: {"initial_state": i["initial_state"].mT[..., :1]}, "initial_state has shape"),
    "integer dt": (lambda i: {"dt": i["dt"].int()}, "dt must be floating"),
    "mixed dtypes": (lambda i: {"Cmat": i["Cmat"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    "chunk_size": (lambda i: {"chunk_size": 0}, "chunk_size must be"),
}


@lanes("cpu")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(lane: Lane, case: str):
    inputs = problem(T=6)
    change, words = BAD[case]
    with pytest.raises(ValueError, match=f"^ssd_chunk_scan: .*{words}") as caught:
        ssd_chunk_scan(**{**inputs, **change(inputs)})
    assert "\n" not in str(caught.value)
