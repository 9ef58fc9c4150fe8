"""Laws of the scan ops, written once over the specs, and what is particular to m2rnn, mamba3_siso and mamba3_mimo.

B batch, T tokens. The oracle is the recurrence in fp64, one step per token, differentiated by autograd. A chunked op is
a different computation. A third one, the published whole-sequence form of mamba3_siso, is written here, with two
incorrect readings of it.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.profiler import profile

from suites.ops import mamba3_mimo as mimo
from suites.ops import mamba3_siso as siso
from suites.ops import specs
from suites.ops.spec import ScanSpec, on_circle
from suites.support.comparison import DTYPES, Named, doubled, worst
from suites.support.custom_ops import traced_through
from suites.support.instruments import present_activities
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick
from suites.support.scans import carried, inner_token, spliced

SCANS = [spec for spec in specs().values() if isinstance(spec, ScanSpec)]
CHUNKED = [op for op in SCANS if op.chunked]
each = pytest.mark.parametrize("op", SCANS, ids=lambda op: op.name)
each_chunked = pytest.mark.parametrize("op", CHUNKED, ids=lambda op: op.name)


@lanes("cpu")
@each
def test_gradcheck(lane: Lane, op: ScanSpec) -> None:
    inputs = op.inputs(**op.smallest)
    tensors = [inputs[n].requires_grad_(n in op.floats) for n in op.names.split()]
    scan = op.of(2)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return scan(**dict(zip(op.names.split(), tensors)))

    assert torch.autograd.gradcheck(run, tensors)

    def truncated(*tensors: Tensor) -> tuple[Tensor, ...]:
        """A fault: the same values, without the gradient of the final state."""
        y, *final = run(*tensors)
        return y, *(t.detach() + 0 * tensors[0].sum() for t in final)

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(truncated, tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@each_chunked
def test_gradients_equal_autograd_of_both_forms(lane: Lane, op: ScanSpec, chunk_size: int) -> None:
    inputs = op.inputs(device=lane.device)
    found = op.trained(op.of(chunk_size), inputs)
    assert worst(found, op.trained(op.naive, inputs)) < op.rounding
    assert worst(found, op.trained(op.of(chunk_size, impl="eager"), inputs)) < op.rounding
    assert worst(op.trained(op.fault, inputs), found) > 0.1


@lanes("cpu", "h200")
@quick
@given(data=st.data())
@each_chunked
def test_any_chunk_size_equals_the_recurrence(lane: Lane, op: ScanSpec, data: st.DataObject) -> None:
    T, start = (data.draw(st.integers(1, op.longest + 10)) for _ in range(2))
    sizes = {**op.odd, **{n: data.draw(values) for n, values in op.drawn.items()}}
    inputs = op.inputs(T=T, **sizes, starts=(start,), device=lane.device, seed=T)
    scan = op.of(data.draw(st.integers(1, op.longest + 20)))
    assert worst(op.values(scan, inputs), op.values(op.naive, inputs)) < op.rounding
    final = dict(zip(op.state, scan(**inputs)[1:]))
    assert all(((final[n] >= 0) & (final[n] < 2 * math.pi)).all() for n in op.turns)


@lanes("cpu", "h200")
@quick
@given(data=st.data(), at=st.floats(0, 1))
@each
def test_two_segments_with_carried_state_equal_one_run(
    lane: Lane, op: ScanSpec, data: st.DataObject, at: float
) -> None:
    T = data.draw(st.integers(2, op.longest))
    split = inner_token(T, at)
    scan = op.of(data.draw(st.integers(1, 64)))

    def in_two(**inputs: Tensor) -> tuple[Tensor, ...]:
        y0, *state = scan(**op.segment(inputs, slice(0, split), op.before(inputs)))
        state = [carried(s, inputs["doc_ids"], split) for s in state]
        y1, *state = scan(**op.segment(inputs, slice(split, T), tuple(state)))
        return torch.cat((y0, y1), 1), *state

    inputs = op.inputs(T=T, **op.odd, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert worst(op.trained(in_two, inputs), op.trained(scan, inputs)) < op.rounding


@lanes("cpu", "h200")
@each
def test_decode_continues_a_prefill(lane: Lane, op: ScanSpec) -> None:
    inputs = op.inputs(T=20, starts=(7,), device=lane.device)
    whole, *last = op.run(**inputs)
    _, *state = op.run(**op.segment(inputs, slice(0, 19), op.before(inputs)))
    token = {n: inputs[n][:, -1] if n in op.per_token else inputs[n] for n in op.floats if n not in op.state}
    stepped, prefilled = op.step(token, tuple(state)), (whole[:, -1], *last)
    assert worst(dict(zip(op.results, stepped)), dict(zip(op.results, prefilled))) < op.rounding


@lanes("cpu")
@each
@pytest.mark.parametrize("impl", ["eager", "op"])
def test_final_state_of_bf16_inputs_is_fp32(lane: Lane, op: ScanSpec, impl: str) -> None:
    _, *state = op.run(**op.inputs(T=8, dtype=torch.bfloat16, starts=(), device=lane.device), impl=impl)
    assert {t.dtype for t in state} == {torch.float32}


@lanes("cpu", "h200")
@quick
@given(data=st.data())
@each
def test_packed_document_equals_document_alone(lane: Lane, op: ScanSpec, data: st.DataObject) -> None:
    """[A|B] gives the same result for B as B alone, and no bit of B depends on the contents of A.

    Bitwise equal if A fills whole chunks (the same sums in the same order), and in the recurrence always. Otherwise the
    chunk borders divide B elsewhere, so its sums are rounded in another order. B of a chunked op has 64 tokens: the
    CPU's sigmoid rounds differently in a tail that does not fill a vector.
    """
    length, chunk_size, dtype = (data.draw(op.packed[n]) for n in ("length", "chunk_size", "dtype"))
    scan = op.of(chunk_size)
    inputs, others = (
        op.inputs(
            T=length + op.packed_tokens, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + i
        )
        for i in (0, 1)
    )
    inputs["doc_ids"][:, length:] += 1
    alone_inputs = op.alone(inputs, length)
    alone, alone_final = _split(scan(**alone_inputs))
    packed, packed_final = _split(scan(**inputs))
    aligned = not op.chunked or length % chunk_size == 0
    same_bits = lane.device in op.same_bits_on
    if aligned:
        assert all(torch.equal(a, b) for a, b in zip(packed_final, alone_final))
    if same_bits:
        assert torch.equal(op.naive(**inputs)[0][:, length:], op.naive(**alone_inputs)[0])
    if aligned and same_bits:
        assert torch.equal(packed[:, length:], alone)
    elif (bound := op.reordered(alone_inputs, alone)) is not None:
        assert ((packed[:, length:].double() - alone).abs() <= bound).all()

    changed, changed_final = _split(scan(**spliced(others, inputs, length, op.per_token[:-1])))
    assert not torch.equal(changed[:, :length], packed[:, :length])
    assert torch.equal(changed[:, length:], packed[:, length:])
    assert all(torch.equal(a, b) for a, b in zip(changed_final, packed_final))

    leaves = {n: t.detach().requires_grad_(n in op.floats) for n, t in inputs.items()}
    scan(**leaves)[0][:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in op.per_token[:-1])
    assert all(leaves[n].grad[:, length:].count_nonzero() > 0 for n in op.per_token[:-1])
    assert all(leaves[n].grad.count_nonzero() == 0 for n in op.state)


def _split(results: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return results[0], results[1:]


@lanes("cpu", "h200")
@quick
@given(data=st.data(), at=st.floats(0, 1))
@each
def test_future_tokens_do_not_affect_the_past(
    lane: Lane, op: ScanSpec, data: st.DataObject, at: float
) -> None:
    T = data.draw(st.integers(2, op.longest))
    now = inner_token(T, at)
    inputs = op.inputs(T=T, **op.odd, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    scan = op.of(data.draw(st.integers(1, 64)))
    later = spliced(inputs, inputs | {n: inputs[n] * 3 + 1 for n in op.per_token}, now, op.per_token)
    y, changed = scan(**inputs)[0], scan(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
@each
def test_large_values_have_finite_correct_gradients(lane: Lane, op: ScanSpec, chunk_size: int) -> None:
    inputs = op.inputs(T=24, dtype=torch.float32, device=lane.device)
    op.overflow(inputs)
    found = op.trained(op.of(chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, op.trained(op.naive, doubled(inputs))) < op.rounding_32


@lanes("cpu")
def test_masked_difference_of_sums_has_a_nan_gradient(lane: Lane) -> None:
    """The usual form of a decay, exp of a difference of running sums and then a mask: what the ops must not do."""
    decay = torch.full((24,), -3e4).requires_grad_()
    sums = decay.cumsum(0)
    torch.exp(sums[:, None] - sums[None, :]).tril().sum().backward()
    assert decay.grad.isnan().any()


@lanes("cpu", "h200")
@each
def test_reference_is_traced_through(lane: Lane, op: ScanSpec) -> None:
    inputs = op.inputs(**op.batches[-1], dtype=torch.float32, device=lane.device)
    traced = traced_through(partial(op.run, impl="eager"), op.trained, inputs)
    assert worst(traced, op.trained(op.run, inputs)) < 1e-5


# What is particular to one op.


@lanes("cpu")
@quick
@given(T=st.integers(1, 40), V=st.integers(1, 5), start=st.integers(1, 40))
def test_m2rnn_equals_autograd_of_both_forms(lane: Lane, T: int, V: int, start: int) -> None:
    op = specs()["m2rnn"]
    inputs = op.inputs(T=T, V=V, starts=(start,), device=lane.device, seed=T)
    found = op.trained(op.run, inputs)
    for impl in ("naive", "eager"):
        assert worst(found, op.trained(partial(op.run, impl=impl), inputs)) < 1e-12


@lanes("cpu")
def test_m2rnn_backward_computes_all_candidates_at_once(lane: Lane) -> None:
    op, counts = specs()["m2rnn"], []
    inputs = op.inputs(T=20, dtype=torch.float32, device=lane.device)
    leaves = {n: t.requires_grad_(n in op.floats) for n, t in inputs.items()}
    with profile(activities=present_activities()) as forward:
        y, _ = op.run(**leaves)
    with profile(activities=present_activities()) as backward:
        y.sum().backward()
    for trace in (forward, backward):
        counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    assert counts == [20, 1]


def published_form(inputs: Named, diagonal: bool = True) -> Tensor:
    """Return y of mamba3_siso, of one document from zero state, all T tokens at once.

    diagonal: subtract the diagonal term.
    """
    i = inputs
    theta = (math.pi * i["angles"].tanh() * i["dt"][..., None]).cumsum(1)

    def rotated(x: Tensor) -> Tensor:
        R = theta.shape[-1]
        pairs = torch.view_as_complex(x[..., : 2 * R].unflatten(-1, (R, 2))) * on_circle(theta)
        return torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., 2 * R :]), -1)

    query, key = siso.biased(i, "q"), siso.biased(i, "k")
    scale, shifted = siso.trapezoid(i)
    heads_first = (rotated(query), rotated(key) * scale[..., None], i["v"], i["adt"].cumsum(1))
    q, k, v, sums = (t.transpose(1, 2) for t in heads_first)
    decay = torch.exp((sums[..., :, None] - sums[..., None, :]).tril()).tril()
    y = (((q @ k.mT) * decay) @ v).transpose(1, 2) + i["D"][:, None] * i["v"]
    if diagonal:
        y = y - i["v"] * (shifted * (query * key).sum(-1))[..., None]
    return y * F.silu(i["z"])


@lanes("cpu", "h200")
def test_published_form_and_two_incorrect_readings(lane: Lane) -> None:
    inputs = siso.make_inputs(starts=(), device=lane.device)
    inputs |= {n: torch.zeros_like(inputs[n]) for n in siso.STATE}
    y = siso.run(**inputs)[0]
    assert (y - published_form(inputs)).abs().max() < 1e-11
    assert (y - published_form(inputs, diagonal=False)).abs().max() > 1
    still = inputs | {"angles": torch.zeros_like(inputs["angles"])}
    y = siso.run(**still)[0]
    assert (y - published_form(still)).abs().max() < 1e-11
    assert (y - siso.scaled_k_in_mamba2(still)).abs().max() > 1


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", [siso.SPEC, mimo.SPEC], ids=lambda op: op.name)
def test_small_lambda_keeps_its_precision(lane: Lane, op: ScanSpec) -> None:
    """If lam is small, a token has little weight for itself: that weight must not be a difference of large numbers."""
    inputs = op.inputs(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= {n: torch.zeros_like(inputs[n]) for n in (*op.state, "D")}
    inputs["trap"] = inputs["trap"] - 12
    oracle = op.naive(**doubled(inputs))[0][:, 0]
    assert ((op.run(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6
    if op is siso.SPEC:
        assert ((published_form(inputs)[:, 0] - oracle) / oracle).abs().median() > 1e-4


PROJECTIONS = ("mimo_v", "mimo_z", "mimo_out")


def siso_of_rank_one(**i: Tensor) -> tuple[Tensor, ...]:
    """Run mamba3_siso on the inputs of rank 1 without their projections; return the results of mamba3_mimo."""
    given = {n: t for n, t in i.items() if n not in PROJECTIONS}
    given |= {n: i[n].squeeze(2) for n in ("q", "k", "k_prev")} | {
        n: i[n].squeeze(1) for n in ("q_bias", "k_bias")
    }
    y, theta, h, k_prev, v_prev = siso.run(**given)
    return y + 0 * sum(i[n].sum() for n in PROJECTIONS), theta, h, k_prev.unsqueeze(2), v_prev


@lanes("cpu", "h200")
def test_rank_one_with_unit_projections_equals_siso(lane: Lane) -> None:
    inputs = mimo.make_inputs(R=1, device=lane.device)
    inputs |= {n: torch.ones_like(inputs[n]) for n in PROJECTIONS}
    ours, theirs = (mimo.SPEC.trained(run, inputs) for run in (mimo.run, siso_of_rank_one))
    for name in PROJECTIONS:
        del ours[name], theirs[name]
    assert worst(ours, theirs) < 1e-12
    y = mimo.run(**inputs | {"mimo_v": 2 * inputs["mimo_v"]})[0]
    assert worst({"y": y}, {"y": theirs["y"]}) > 0.1


@lanes("cpu", "h200")
def test_ranks_share_one_state(lane: Lane) -> None:
    inputs = mimo.make_inputs(device=lane.device)
    right = {"y": mimo.run(**inputs)[0]}
    assert worst({"y": mimo.one_rank_each(**inputs)[0]}, right) > 0.1
    backward = {n: inputs[n].flip(2) for n in ("q", "k", "k_prev")}
    backward |= {n: inputs[n].flip(1) for n in mimo.RANKED}
    assert worst({"y": mimo.run(**inputs | backward)[0]}, right) < 1e-13
