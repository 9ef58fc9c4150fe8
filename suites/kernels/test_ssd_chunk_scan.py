"""ssd_chunk_scan: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ssd_chunk_scan import (
    ssd_chunk_scan,
    ssd_chunk_scan_recurrent,
    ssd_chunk_scan_reference,
    ssd_chunk_scan_step,
)
from suites.kernels.inputs.ssd_chunk_scan import PER_TOKEN, make_inputs
from suites.support.comparison import (
    DTYPES,
    Named,
    doubled,
    pooled,
    report_pooled,
    values_and_gradients,
    worst,
)
from suites.support.custom_ops import check_one_graph, check_op, refused, strided, traced_through, turned
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.scans import carried, cut, inner_token, spliced

NAMES = ("x", "dt", "A", "Bmat", "Cmat", "D", "doc_ids", "initial_state")
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
FWD, BWD = torch.ops.bumpgate.ssd_chunk_scan_fwd, torch.ops.bumpgate.ssd_chunk_scan_bwd
quick = settings(derandomize=True, max_examples=15, deadline=None)
results = partial(values_and_gradients, ("y", "final"))


def segment(inputs: Named, tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    """Return some of the tokens, with a given state."""
    return cut(inputs, tokens, PER_TOKEN) | {"initial_state": state}


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,P) in fp32.

    y is a sum of products. Each goes through at most T + N additions, and T more in its exponent s, where an error of T
    u |s| on a weight exp(s) is at most T u of the undecayed one. So (2 T + N + 16) u times the same scan over absolute
    values, with no decay and no reset, bounds it; 16 for the roundings of single factors.
    """
    sizes = {n: t.abs() if t.is_floating_point() else t * 0 for n, t in doubled(inputs).items()}
    T, N = inputs["x"].shape[1], inputs["Bmat"].shape[3]
    return (2 * T + N + 16) * 2**-24 * ssd_chunk_scan_recurrent(**sizes | {"A": sizes["A"] * 0})[0]


def without_carry(chunk_size: int, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A fault: each chunk from a zero state, so the quadratic part without the state between chunks."""
    zero = torch.zeros_like(inputs["initial_state"])
    starts = range(0, inputs["x"].shape[1], chunk_size)
    parts = [ssd_chunk_scan_reference(**segment(inputs, slice(t, t + chunk_size), zero)) for t in starts]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    chunked = partial(ssd_chunk_scan, chunk_size=16)
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(ssd_chunk_scan_recurrent, doubled(inputs)) for inputs in seeds)
    if lane.device == "cuda" and dtype != "fp32":  # a kernel there multiplies 16-bit operands
        with OperandsIn(DTYPES[dtype]):
            plain = pooled(results(partial(chunked, impl="reference"), inputs) for inputs in seeds)
    else:
        plain = pooled(results(ssd_chunk_scan_recurrent, inputs) for inputs in seeds)
    found = pooled(results(chunked, inputs) for inputs in seeds)
    for name in oracle:
        expected = seeds[0][{"y": "x", "final": "dt"}.get(name, name)].dtype
        assert found[name].dtype == plain[name].dtype == expected
    report_pooled(row, f"kernels/ssd_chunk_scan-{lane.name}-{dtype}", found, plain, oracle, inputs=FLOATS)


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle, _ = ssd_chunk_scan_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must separate a wrong scan from a correct one: no state between chunks, and no reset.
    wrong, _ = without_carry(16, **inputs)
    assert ((wrong - oracle).abs() > bound).double().mean() > 0.5
    unreset, _ = ssd_chunk_scan(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.2


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = make_inputs(B=2, T=5, H=2, P=2, N=2, G=1, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    assert torch.autograd.gradcheck(lambda *t: ssd_chunk_scan(*t, chunk_size=2), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = make_inputs(device=lane.device)
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
def test_any_chunk_size_equals_the_recurrence(lane: Lane, T: int, chunk_size: int, G: int, start: int):
    inputs = make_inputs(T=T, G=G, P=3, N=5, starts=(start,), device=lane.device, seed=T)
    found, final = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
    oracle, last = ssd_chunk_scan_recurrent(**inputs)
    assert worst({"y": found, "final": final}, {"y": oracle, "final": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_two_segments_with_carried_state_equal_one_run(lane: Lane, T: int, at: float, chunk_size: int):
    split = inner_token(T, at)

    def in_two(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        head = segment(inputs, slice(0, split), inputs["initial_state"])
        y0, state = ssd_chunk_scan(**head, chunk_size=chunk_size)
        state = carried(state, inputs["doc_ids"], split)
        y1, state = ssd_chunk_scan(**segment(inputs, slice(split, T), state), chunk_size=chunk_size)
        return torch.cat((y0, y1), 1), state

    inputs = make_inputs(T=T, P=3, N=5, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert (
        worst(results(in_two, inputs), results(partial(ssd_chunk_scan, chunk_size=chunk_size), inputs))
        < 1e-13
    )


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = make_inputs(T=20, starts=(7,), device=lane.device)
    whole, last = ssd_chunk_scan(**inputs)
    _, state = ssd_chunk_scan(**segment(inputs, slice(0, 19), inputs["initial_state"]))
    tokens = {
        n: inputs[n][:, -1] if n in PER_TOKEN else inputs[n] for n in ("x", "dt", "A", "Bmat", "Cmat", "D")
    }
    y, state = ssd_chunk_scan_step(**tokens, state=state)
    assert worst({"y": y, "state": state}, {"y": whole[:, -1], "state": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 40), chunk_size=st.sampled_from([4, 16, 64]), dtype=st.sampled_from([*DTYPES]))
def test_packed_document_equals_document_alone(lane: Lane, length: int, chunk_size: int, dtype: str):
    """[A|B] gives the same result for B as B alone, and no bit of B depends on the contents of A.

    Bitwise equal if A fills whole chunks (the same sums in the same order), and in the recurrence always. Otherwise the
    chunk borders divide B elsewhere, so its sums are rounded in another order.
    """
    inputs = make_inputs(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length)
    inputs["doc_ids"][:, length:] += 1
    scan = partial(ssd_chunk_scan, chunk_size=chunk_size)
    alone_inputs = segment(inputs, slice(length, None), None)
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

    others = make_inputs(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + 1)
    mixed = spliced({n: t * 100 for n, t in others.items()}, inputs, length, PER_TOKEN[:-1])
    assert not torch.equal(scan(**mixed)[0][:, :length], packed[:, :length])
    assert torch.equal(scan(**mixed)[0][:, length:], packed[:, length:])
    assert torch.equal(scan(**mixed)[1], packed_final)


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_future_tokens_do_not_affect_the_past(lane: Lane, T: int, at: float, chunk_size: int):
    now = inner_token(T, at)
    inputs = make_inputs(T=T, P=3, N=5, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
    other = inputs | {n: inputs[n] * 3 + 1 for n in PER_TOKEN}
    later = spliced(inputs, other, now, PER_TOKEN)
    changed, _ = ssd_chunk_scan(**later, chunk_size=chunk_size)
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_strong_decay_has_finite_correct_gradients(lane: Lane, chunk_size: int):
    inputs = make_inputs(T=24, dtype=torch.float32, device=lane.device)
    inputs["dt"][:, 5::7] = 3e3
    inputs["A"][0] = -80.0
    found = results(partial(ssd_chunk_scan, chunk_size=chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(ssd_chunk_scan_recurrent, doubled(inputs))) < 1e-5
    # The usual way, exp of a difference of running sums and then a mask, does give NaN here.
    decay = (inputs["A"] * inputs["dt"])[0, :, 0].requires_grad_()
    sums = decay.cumsum(0)
    torch.exp(sums[:, None] - sums[None, :]).tril().sum().backward()
    assert decay.grad.isnan().any()


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    small = make_inputs(B=2, T=9, H=4, P=3, N=5, G=2, starts=(4,), dtype=torch.float32, device=lane.device)
    inputs = strided(small.values())
    check_op(FWD, (*inputs, 4), differentiable=True)
    check_op(BWD, (*inputs, 4, *(turned(t, 0, 1) for t in FWD(*inputs, 4))))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    batches = [make_inputs(B=B, T=20, dtype=torch.float32, device=lane.device) for B in (2, 3, 5)]
    check_one_graph(
        ssd_chunk_scan, results, batches, op="ssd_chunk_scan", dynamic=(*PER_TOKEN, "initial_state")
    )
    traced = traced_through(partial(ssd_chunk_scan, impl="reference"), results, batches[-1])
    assert worst(traced, results(ssd_chunk_scan, batches[-1])) < 1e-5


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
def test_bad_input_raises_one_line_error(lane: Lane, case: str):
    inputs = make_inputs(T=6)
    change, words = BAD[case]
    with refused("ssd_chunk_scan", words):
        ssd_chunk_scan(**{**inputs, **change(inputs)})
