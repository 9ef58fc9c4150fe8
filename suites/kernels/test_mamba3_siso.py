"""mamba3_siso: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation. A third one, the
published whole-sequence form, is written here, with two incorrect readings of it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_siso import Mamba3State, mamba3_siso, mamba3_siso_step
from suites.kernels.inputs.mamba3_siso import (
    FLOATS,
    NAMES,
    PER_TOKEN,
    STATE,
    Scan,
    biased,
    flat,
    make_inputs,
    on_circle,
    op,
    recurrence,
    scaled_k_in_mamba2,
    trapezoid,
)
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

FIXED = ("q_bias", "k_bias", "D")
FWD, BWD = torch.ops.bumpgate.mamba3_siso_fwd, torch.ops.bumpgate.mamba3_siso_bwd
quick = settings(derandomize=True, max_examples=15, deadline=None)


def segment(inputs: Named, tokens: slice, state: tuple[Tensor, ...]) -> Named:
    """Return some of the tokens, with a given state."""
    return cut(inputs, tokens, PER_TOKEN) | dict(zip(STATE, state))


def nothing(inputs: Named) -> tuple[Tensor, ...]:
    """Return the state before any token."""
    return tuple(torch.zeros_like(inputs[n]) for n in STATE)


def results(scan: Scan, inputs: Named) -> Named:
    """Return y, the final state (theta as a point on the circle), and the gradients of a weighting of both."""
    found = values_and_gradients(("y", *(f"final {n}" for n in STATE)), scan, inputs)
    return found | {"final theta": on_circle(found["final theta"])}


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,P) in fp32.

    y is a sum over tokens of products of norms |q_t| |k_s| |v_s|. Each goes through at most T + N additions, T more in
    its exponent (T u |s| on a weight exp(s) is at most T u of the undecayed one), and two angles. An angle is a sum of
    T terms: pi u per term for the addition, and 4 pi u dt for the term, 28 u for dt below 2. 16 u more for the
    roundings of single factors.
    """
    i = doubled(inputs)
    T, N = i["q"].shape[1], i["q"].shape[3]
    query, key = (biased(i, n).norm(dim=-1)[..., None] for n in "qk")
    before = (
        i["h"].norm(dim=-1) + i["dt"][:, 0, :, None] * i["k_prev"].norm(dim=-1)[..., None] * i["v_prev"].abs()
    )
    twice = i["dt"] + F.pad(i["dt"][:, 1:], (0, 0, 0, 1))
    sums = before[:, None] + (twice[..., None] * key * i["v"].abs()).cumsum(1)
    size = (query * sums + i["D"].abs()[:, None] * i["v"].abs()) * F.silu(i["z"]).abs()
    return (58 * T + N + 16) * 2**-24 * size


def published_form(inputs: Named, diagonal: bool = True) -> Tensor:
    """Return y of one document from zero state, all T tokens at once. diagonal: subtract the diagonal term."""
    i = inputs
    theta = (math.pi * i["angles"].tanh() * i["dt"][..., None]).cumsum(1)

    def rotated(x: Tensor) -> Tensor:
        R = theta.shape[-1]
        pairs = torch.view_as_complex(x[..., : 2 * R].unflatten(-1, (R, 2))) * on_circle(theta)
        return torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., 2 * R :]), -1)

    query, key = biased(i, "q"), biased(i, "k")
    scale, shifted = trapezoid(i)
    heads_first = (rotated(query), rotated(key) * scale[..., None], i["v"], i["adt"].cumsum(1))
    q, k, v, sums = (t.transpose(1, 2) for t in heads_first)
    decay = torch.exp((sums[..., :, None] - sums[..., None, :]).tril()).tril()
    y = (((q @ k.mT) * decay) @ v).transpose(1, 2) + i["D"][:, None] * i["v"]
    if diagonal:
        y = y - i["v"] * (shifted * (query * key).sum(-1))[..., None]
    return y * F.silu(i["z"])


@lanes("cpu", "h200")
def test_published_form_and_two_incorrect_readings(lane: Lane):
    inputs = make_inputs(starts=(), device=lane.device)
    inputs |= dict(zip(STATE, nothing(inputs)))
    y, *_ = op(**inputs)
    assert (y - published_form(inputs)).abs().max() < 1e-11
    assert (y - published_form(inputs, diagonal=False)).abs().max() > 1
    still = inputs | {"angles": torch.zeros_like(inputs["angles"])}
    assert (op(**still)[0] - published_form(still)).abs().max() < 1e-11
    assert (op(**still)[0] - scaled_k_in_mamba2(still)).abs().max() > 1


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(recurrence, doubled(inputs)) for inputs in seeds)
    if lane.device == "cuda" and dtype != "fp32":  # a kernel there multiplies 16-bit operands
        with OperandsIn(DTYPES[dtype]):
            chunked = flat(mamba3_siso, chunk_size=16, impl="reference")
            plain = pooled(results(chunked, inputs) for inputs in seeds)
    else:
        plain = pooled(results(recurrence, inputs) for inputs in seeds)
    found = pooled(results(flat(mamba3_siso, chunk_size=16), inputs) for inputs in seeds)
    last_v = torch.cat([inputs["v"][:, -1].float().flatten() for inputs in seeds])
    assert torch.equal(found["final v_prev"], last_v)
    del oracle["final v_prev"]  # exact in all of them: there is no ratio
    report_pooled(row, f"kernels/mamba3_siso-{lane.name}-{dtype}", found, plain, oracle, inputs=FLOATS)


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle, *_ = recurrence(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, *_ = flat(mamba3_siso, chunk_size=chunk_size)(**inputs)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must separate a wrong scan from a correct one: no reset, and the angle not carried.
    unreset, *_ = op(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.1
    unturned, *_ = op(**inputs | {"theta": torch.zeros_like(inputs["theta"])})
    assert ((unturned - oracle).abs() > bound)[:, :10].double().mean() > 0.5


@lanes("cpu", "h200")
def test_small_lambda_keeps_its_precision(lane: Lane):
    """If lam is small, a token has little weight for itself: that weight must not be a difference of large numbers."""
    inputs = make_inputs(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= dict(zip(STATE, nothing(inputs))) | {"D": torch.zeros_like(inputs["D"])}
    inputs["trap"] = inputs["trap"] - 12
    oracle = recurrence(**doubled(inputs))[0][:, 0]
    assert ((op(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6
    assert ((published_form(inputs)[:, 0] - oracle) / oracle).abs().median() > 1e-4


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = make_inputs(B=2, T=5, H=2, P=2, N=3, G=1, R=1, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    scan = flat(mamba3_siso, chunk_size=2)
    assert torch.autograd.gradcheck(lambda *t: scan(**dict(zip(NAMES, t))), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = make_inputs(device=lane.device)
    found = results(flat(mamba3_siso, chunk_size=chunk_size), inputs)
    assert worst(found, results(recurrence, inputs)) < 1e-12
    assert worst(found, results(flat(mamba3_siso, chunk_size=chunk_size, impl="reference"), inputs)) < 1e-12
    # A fault: the given state without its v_prev k_prev^T.
    assert worst(results(lambda **i: op(**i | {"v_prev": i["v_prev"] * 0}), inputs), found) > 0.1


@lanes("cpu", "h200")
@quick
@given(
    T=st.integers(1, 70),
    chunk_size=st.integers(1, 80),
    G=st.sampled_from([1, 2, 4]),
    R=st.integers(0, 2),
    start=st.integers(1, 70),
)
def test_any_chunk_size_equals_the_recurrence(
    lane: Lane, T: int, chunk_size: int, G: int, R: int, start: int
):
    inputs = make_inputs(T=T, G=G, R=R, P=3, N=5, starts=(start,), device=lane.device, seed=T)
    y, theta, *rest = flat(mamba3_siso, chunk_size=chunk_size)(**inputs)
    y0, theta0, *rest0 = recurrence(**inputs)
    assert worst(dict(enumerate((y, *rest))), dict(enumerate((y0, *rest0)))) < 1e-12
    assert (on_circle(theta) - on_circle(theta0)).abs().sum() < 1e-11
    assert ((theta >= 0) & (theta < 2 * math.pi)).all()


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_two_segments_with_carried_state_equal_one_run(lane: Lane, T: int, at: float, chunk_size: int):
    split = inner_token(T, at)
    scan = flat(mamba3_siso, chunk_size=chunk_size)

    def in_two(**inputs: Tensor) -> tuple[Tensor, ...]:
        y0, *state = scan(**segment(inputs, slice(0, split), tuple(inputs[n] for n in STATE)))
        state = [carried(s, inputs["doc_ids"], split) for s in state]
        y1, *state = scan(**segment(inputs, slice(split, T), tuple(state)))
        return torch.cat((y0, y1), 1), *state

    inputs = make_inputs(T=T, P=3, N=6, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert worst(results(in_two, inputs), results(scan, inputs)) < 1e-12


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = make_inputs(T=20, starts=(7,), device=lane.device)
    whole, *last = op(**inputs)
    _, *state = op(**segment(inputs, slice(0, 19), tuple(inputs[n] for n in STATE)))
    token = {n: inputs[n][:, -1] for n in PER_TOKEN[:-1]} | {n: inputs[n] for n in FIXED}
    y, state = mamba3_siso_step(**token, state=Mamba3State(*state))
    named = [dict(zip(("y", *STATE), side)) for side in ((y, *state), (whole[:, -1], *last))]
    assert worst(*named) < 1e-12


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 40), chunk_size=st.sampled_from([4, 16, 64]), dtype=st.sampled_from([*DTYPES]))
def test_packed_document_equals_document_alone(lane: Lane, length: int, chunk_size: int, dtype: str):
    """[A|B] gives the same result for B as B alone, and no bit of B depends on the contents of A.

    Bitwise equal if A fills whole chunks (the same sums in the same order), and in the recurrence always. Otherwise the
    chunk borders divide B elsewhere, so its sums are rounded in another order.
    """
    scan = flat(mamba3_siso, chunk_size=chunk_size)
    inputs, others = (
        make_inputs(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + i)
        for i in (0, 1)
    )
    inputs["doc_ids"][:, length:] += 1
    alone_inputs = segment(inputs, slice(length, None), nothing(inputs))
    alone, packed = scan(**alone_inputs), scan(**inputs)
    if length % chunk_size == 0:
        assert torch.equal(packed[0][:, length:], alone[0])
        assert all(torch.equal(a, b) for a, b in zip(packed[1:], alone[1:]))
    elif dtype == "fp32":
        assert ((packed[0][:, length:] - alone[0]).abs() <= 2 * rounding_bound(alone_inputs)).all()
    assert torch.equal(recurrence(**inputs)[0][:, length:], recurrence(**alone_inputs)[0])

    changed = scan(**spliced(others, inputs, length, PER_TOKEN[:-1]))
    assert not torch.equal(changed[0][:, :length], packed[0][:, :length])
    assert torch.equal(changed[0][:, length:], packed[0][:, length:])
    assert all(torch.equal(a, b) for a, b in zip(changed[1:], packed[1:]))

    leaves = {n: t.detach().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    scan(**leaves)[0][:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in PER_TOKEN[:-1])
    assert all(leaves[n].grad.count_nonzero() == 0 for n in STATE)
    assert leaves["v"].grad[:, length:].count_nonzero() > 0


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_future_tokens_do_not_affect_the_past(lane: Lane, T: int, at: float, chunk_size: int):
    now = inner_token(T, at)
    inputs = make_inputs(T=T, P=3, N=6, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    scan = flat(mamba3_siso, chunk_size=chunk_size)
    other = inputs | {n: inputs[n] * 3 + 1 for n in PER_TOKEN}
    later = spliced(inputs, other, now, PER_TOKEN)
    y, changed = scan(**inputs)[0], scan(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_strong_decay_has_finite_correct_gradients(lane: Lane, chunk_size: int):
    inputs = make_inputs(T=24, dtype=torch.float32, device=lane.device)
    inputs["adt"][:, 5::7] = -3e4
    inputs["adt"][:, 8, 0] = -float("inf")
    found = results(flat(mamba3_siso, chunk_size=chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(recurrence, doubled(inputs))) < 2e-5
    # The usual way, exp of a difference of running sums and then a mask, does give NaN here.
    decay = inputs["adt"][0, :, 1].clone().requires_grad_()
    sums = decay.cumsum(0)
    torch.exp(sums[:, None] - sums[None, :]).tril().sum().backward()
    assert decay.grad.isnan().any()


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = make_inputs(
        B=2, T=9, H=4, P=3, N=5, G=2, R=2, starts=(4,), dtype=torch.float32, device=lane.device
    )
    arguments = (*strided(inputs[n] for n in NAMES), 4)
    check_op(FWD, arguments, differentiable=True)
    check_op(BWD, (*arguments, *(turned(t, 0, 1) for t in FWD(*arguments))))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    batches = [make_inputs(B=B, T=20, dtype=torch.float32, device=lane.device) for B in (2, 3, 5)]
    check_one_graph(op, results, batches, op="mamba3_siso", dynamic=(*PER_TOKEN, *STATE))
    traced = traced_through(flat(mamba3_siso, impl="reference"), results, batches[-1])
    assert worst(traced, results(op, batches[-1])) < 1e-5


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "v must be"),
    "groups": (lambda i: {"q": i["q"][:, :, [0, 1, 0]]}, "H divisible by G"),
    "angles": (lambda i: {"angles": i["angles"].repeat(1, 1, 1, 2)}, "2R <= N"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "k": (lambda i: {"k": i["k"][..., :-1]}, "k has shape"),
    "state": (lambda i: {"h": i["h"][:, :1]}, "state.h has shape"),
    "integer dt": (lambda i: {"dt": i["dt"].int()}, "dt must be floating"),
    "mixed dtypes": (lambda i: {"z": i["z"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    "chunk_size": (lambda i: {"chunk_size": 0}, "chunk_size must be"),
}


@lanes("cpu")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_error(lane: Lane, case: str):
    inputs = make_inputs(T=6)
    change, words = BAD[case]
    with refused("mamba3_siso", words):
        op(**{**inputs, **change(inputs)})
