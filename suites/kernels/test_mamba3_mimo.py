"""mamba3_mimo: the chunked op against the token-by-token recurrence and against mamba3_siso, forward and backward.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_mimo import Mamba3MimoState, mamba3_mimo, mamba3_mimo_step
from kernels.mamba3_mimo.upstream import halves_from_pairs
from kernels.mamba3_siso import Mamba3State, mamba3_siso
from suites.kernels.inputs.mamba3_mimo import (
    FIXED,
    FLOATS,
    NAMES,
    PER_TOKEN,
    STATE,
    Scan,
    flat,
    make_inputs,
    on_circle,
    one_rank_each,
    op,
    recurrence,
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
from suites.support.scans import carried, cut, inner_token, spliced

FWD, BWD = torch.ops.bumpgate.mamba3_mimo_fwd, torch.ops.bumpgate.mamba3_mimo_bwd
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


def as_siso(inputs: Named) -> tuple[Tensor, ...]:
    """Run mamba3_siso on the inputs of rank 1, without projections; return the results of mamba3_mimo."""
    given = {n: t for n, t in inputs.items() if n not in STATE and not n.startswith("mimo_")}
    given |= {n: inputs[n].squeeze(2) for n in ("q", "k")}
    given |= {n: inputs[n].squeeze(1) for n in ("q_bias", "k_bias")}
    state = Mamba3State(*(inputs[n].squeeze(2) if n == "k_prev" else inputs[n] for n in STATE))
    y, (theta, h, k_prev, v_prev) = mamba3_siso(**given, state=state)
    return y, theta, h, k_prev.unsqueeze(2), v_prev


@lanes("cpu", "h200")
def test_rank_one_with_unit_projections_equals_siso(lane: Lane):
    inputs = make_inputs(R=1, device=lane.device)
    inputs |= {n: torch.ones_like(inputs[n]) for n in ("mimo_v", "mimo_z", "mimo_out")}
    projections = ("mimo_v", "mimo_z", "mimo_out")

    def siso(**i: Tensor) -> tuple[Tensor, ...]:
        y, *state = as_siso(i)
        return y + 0 * sum(i[n].sum() for n in projections), *state

    ours, theirs = results(op, inputs), results(siso, inputs)
    for name in projections:
        del ours[name], theirs[name]
    assert worst(ours, theirs) < 1e-12
    doubled_up = inputs | {"mimo_v": 2 * inputs["mimo_v"]}
    assert worst({"y": op(**doubled_up)[0]}, {"y": theirs["y"]}) > 0.1


@lanes("cpu", "h200")
def test_ranks_share_one_state(lane: Lane):
    """The state sums over ranks before any of them reads it; the order of the ranks does not matter."""
    inputs = make_inputs(device=lane.device)
    right = op(**inputs)[0]
    assert worst({"y": one_rank_each(**inputs)[0]}, {"y": right}) > 0.1
    backward = {n: inputs[n].flip(2) for n in ("q", "k", "k_prev")} | {
        n: inputs[n].flip(1) for n in FIXED if n != "D"
    }
    assert worst({"y": op(**inputs | backward)[0]}, {"y": right}) < 1e-13


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_form(lane: Lane, dtype: str, row):
    """The plain formula is the whole row at once. The recurrence is not suitable: it adds its angles one by one, so
    that neighbours share their errors, and in fp32 its y is closer than that of any parallel sum.
    """
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(recurrence, doubled(inputs)) for inputs in seeds)
    whole = flat(mamba3_mimo, chunk_size=30, impl="reference")
    plain = pooled(results(whole, inputs) for inputs in seeds)
    found = pooled(results(flat(mamba3_mimo, chunk_size=8), inputs) for inputs in seeds)
    last_v = torch.cat([inputs["v"][:, -1].float().flatten() for inputs in seeds])
    assert torch.equal(found["final v_prev"], last_v)
    del oracle["final v_prev"]  # exact in all of them: there is no ratio
    report_pooled(row, f"kernels/mamba3_mimo-{lane.name}-{dtype}", found, plain, oracle, inputs=FLOATS)


@lanes("cpu", "h200")
def test_small_lambda_keeps_its_precision(lane: Lane):
    """If lam is small, a token has little weight for itself: that weight must not be a difference of large numbers."""
    inputs = make_inputs(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= dict(zip(STATE, nothing(inputs))) | {"D": torch.zeros_like(inputs["D"])}
    inputs["trap"] = inputs["trap"] - 12
    oracle = recurrence(**doubled(inputs))[0][:, 0]
    assert ((op(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = make_inputs(B=2, T=4, H=2, R=2, P=2, N=3, G=1, A=1, starts=(2,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    scan = flat(mamba3_mimo, chunk_size=2)
    assert torch.autograd.gradcheck(lambda *t: scan(**dict(zip(NAMES, t))), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = make_inputs(device=lane.device)
    found = results(flat(mamba3_mimo, chunk_size=chunk_size), inputs)
    assert worst(found, results(recurrence, inputs)) < 1e-12
    assert worst(found, results(flat(mamba3_mimo, chunk_size=chunk_size, impl="reference"), inputs)) < 1e-12
    # A fault: the given state without its value and keys.
    assert worst(results(lambda **i: op(**i | {"v_prev": i["v_prev"] * 0}), inputs), found) > 0.1


@lanes("cpu", "h200")
@quick
@given(
    T=st.integers(1, 40),
    chunk_size=st.integers(1, 50),
    R=st.integers(1, 4),
    G=st.sampled_from([1, 2, 4]),
    A=st.integers(0, 2),
    start=st.integers(1, 40),
)
def test_any_chunk_size_equals_the_recurrence(
    lane: Lane, T: int, chunk_size: int, R: int, G: int, A: int, start: int
):
    inputs = make_inputs(T=T, R=R, G=G, A=A, P=3, N=5, starts=(start,), device=lane.device, seed=T)
    y, theta, *rest = flat(mamba3_mimo, chunk_size=chunk_size)(**inputs)
    y0, theta0, *rest0 = recurrence(**inputs)
    assert worst(dict(enumerate((y, *rest))), dict(enumerate((y0, *rest0)))) < 1e-12
    assert (on_circle(theta) - on_circle(theta0)).abs().sum() < 1e-11
    assert ((theta >= 0) & (theta < 2 * math.pi)).all()


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1), chunk_size=st.integers(1, 40))
def test_two_segments_with_carried_state_equal_one_run(lane: Lane, T: int, at: float, chunk_size: int):
    split = inner_token(T, at)
    scan = flat(mamba3_mimo, chunk_size=chunk_size)

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
    y, state = mamba3_mimo_step(**token, state=Mamba3MimoState(*state))
    named = [dict(zip(("y", *STATE), side)) for side in ((y, *state), (whole[:, -1], *last))]
    assert worst(*named) < 1e-12


@lanes("cpu", "h200")
@quick
@given(length=st.sampled_from([4, 8, 16, 32]), chunk_size=st.sampled_from([4, 8, 16]))
def test_packed_document_equals_document_alone(lane: Lane, length: int, chunk_size: int):
    """[A|B] gives the same result for B as B alone, and no bit of B depends on the contents of A.

    B has 64 tokens: the CPU's sigmoid rounds differently in a tail that does not fill a vector.
    """
    scan = flat(mamba3_mimo, chunk_size=chunk_size)
    inputs = make_inputs(T=length + 64, dtype=torch.float32, starts=(), device=lane.device, seed=length)
    inputs["doc_ids"][:, length:] += 1
    alone, packed = scan(**segment(inputs, slice(length, None), nothing(inputs))), scan(**inputs)
    if length % chunk_size == 0:  # otherwise the chunk borders divide B elsewhere: another order of sums
        assert torch.equal(packed[0][:, length:], alone[0])
        assert all(torch.equal(a, b) for a, b in zip(packed[1:], alone[1:]))
    other = make_inputs(T=length + 64, dtype=torch.float32, starts=(), device=lane.device, seed=length + 1)
    changed = scan(**spliced(other, inputs, length, PER_TOKEN[:-1]))
    assert not torch.equal(changed[0][:, :length], packed[0][:, :length])
    assert torch.equal(changed[0][:, length:], packed[0][:, length:])
    assert all(torch.equal(a, b) for a, b in zip(changed[1:], packed[1:]))


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1), chunk_size=st.integers(1, 40))
def test_future_tokens_do_not_affect_the_past(lane: Lane, T: int, at: float, chunk_size: int):
    now = inner_token(T, at)
    inputs = make_inputs(T=T, P=3, N=6, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    scan = flat(mamba3_mimo, chunk_size=chunk_size)
    later = spliced(inputs, inputs | {n: inputs[n] * 3 + 1 for n in PER_TOKEN}, now, PER_TOKEN)
    y, changed = scan(**inputs)[0], scan(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_strong_decay_has_finite_correct_gradients(lane: Lane, chunk_size: int):
    inputs = make_inputs(T=24, dtype=torch.float32, device=lane.device)
    inputs["adt"][:, 5::7] = -3e4
    inputs["adt"][:, 8, 0] = -float("inf")
    found = results(flat(mamba3_mimo, chunk_size=chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(recurrence, doubled(inputs))) < 2e-5


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = make_inputs(B=2, T=7, R=2, P=3, N=5, A=2, starts=(4,), dtype=torch.float32, device=lane.device)
    arguments = (*strided(inputs[n] for n in NAMES), 4)
    check_op(FWD, arguments, differentiable=True)
    check_op(BWD, (*arguments, *(turned(t, 0, 1) for t in FWD(*arguments))))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    batches = [make_inputs(B=B, T=12, dtype=torch.float32, device=lane.device) for B in (2, 3, 5)]
    check_one_graph(op, results, batches, op="mamba3_mimo", dynamic=(*PER_TOKEN, *STATE))
    traced = traced_through(flat(mamba3_mimo, impl="reference"), results, batches[-1])
    assert worst(traced, results(op, batches[-1])) < 1e-5


@lanes("cpu")
@pytest.mark.parametrize("A", [2, 4])
def test_peer_order_of_state_dims_rotates_same_pairs(lane: Lane, A: int):
    """The peer's rotation, i with i + N/2, in its order of dims equals ours on adjacent dims; in our order it
    differs.
    """
    g = torch.Generator().manual_seed(0)
    x, angle, N = torch.randn(8, generator=g), torch.randn(A, generator=g), 8
    order = halves_from_pairs(N, A)

    def theirs(u: Tensor) -> Tensor:
        a, b, out = u[:A], u[N // 2 : N // 2 + A], u.clone()
        out[:A] = a * angle.cos() - b * angle.sin()
        out[N // 2 : N // 2 + A] = a * angle.sin() + b * angle.cos()
        return out

    ours = x.clone()
    ours[: 2 * A] = torch.view_as_real(
        torch.view_as_complex(x[: 2 * A].view(A, 2)) * on_circle(angle)
    ).flatten()
    assert sorted(order) == [*range(N)]
    torch.testing.assert_close(theirs(x[order]), ours[order])
    assert (theirs(x) - ours).abs().max() > 0.1


@lanes("cpu")
def test_absent_peer_error_names_its_install_command(lane: Lane):
    with pytest.raises(
        ImportError, match=r"mamba3_mimo: impl 'upstream' needs .*tilelang.*pip install .*tilelang"
    ):
        flat(mamba3_mimo, impl="upstream")(**make_inputs(T=6))


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "dims": (lambda i: {"v": i["v"][0]}, "v must be"),
    "groups": (lambda i: {"q": i["q"][:, :, :, [0, 1, 0]]}, "H divisible by G"),
    "angles": (lambda i: {"angles": i["angles"].repeat(1, 1, 1, 2)}, "2A <= N"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "no ranks": (lambda i: {n: i[n][:, :, :0] for n in ("q", "k")}, "R >= 1"),
    "k": (lambda i: {"k": i["k"][..., :-1]}, "k has shape"),
    "ranks": (lambda i: {"mimo_out": i["mimo_out"][:, :1]}, "mimo_out has shape"),
    "state": (lambda i: {"k_prev": i["k_prev"][:, :, :1]}, "state.k_prev has shape"),
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
    with refused("mamba3_mimo", words):
        op(**{**inputs, **change(inputs)})
