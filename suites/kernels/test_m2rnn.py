"""m2rnn: the op against the token-by-token definition, in value, gradient and compilation.

B batch, T tokens, H heads, K key dim, V value dim.
The oracle is the recurrence in fp64, one step per token, differentiated by autograd. The op's forward is the same loop
with everything except the recurrence computed outside of it; its backward is derived by hand.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.profiler import ProfilerActivity, profile

from kernels.m2rnn import m2rnn, m2rnn_recurrent, m2rnn_step
from suites.kernels.inputs.m2rnn import FLOATS, NAMES, PER_TOKEN, make_inputs
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
from suites.support.reduce import largest
from suites.support.scans import carried, cut, inner_token, spliced

FWD, BWD = torch.ops.bumpgate.m2rnn_fwd, torch.ops.bumpgate.m2rnn_bwd
quick = settings(derandomize=True, max_examples=15, deadline=None)
results = partial(values_and_gradients, ("y", "final"))


def segment(inputs: Named, tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    """Return some of the tokens, with a given state."""
    return cut(inputs, tokens, PER_TOKEN) | {"h0": state}


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,V) in fp32, for W of spectral norm 1.

    A step then does not amplify a row error of h, so T steps add up to T times the error of one: (V + 8) u on a row of
    h W + k v^T and of h, whose norms V m + |k| |v| and m V bound (m the largest entry of h, at least 1). The read-out
    adds the rows with weights |q|, and K + 1 further roundings.
    """
    i = doubled(inputs)
    T, K, V = i["q"].shape[1], i["k"].shape[3], i["v"].shape[3]
    m = largest((1.0, i["h0"].abs().max().item()))
    one_step = (V + 8) * (2 * m * V + i["k"].abs().max() * i["v"].norm(dim=-1).max())
    return 2**-24 * (T * one_step + (K + 1) * m) * i["q"].abs().sum(-1, keepdim=True)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(m2rnn_recurrent, doubled(inputs)) for inputs in seeds)
    plain = pooled(results(m2rnn_recurrent, inputs) for inputs in seeds)
    found = pooled(results(m2rnn, inputs) for inputs in seeds)
    for name in oracle:
        expected = seeds[0][{"y": "v", "final": "h0"}.get(name, name)].dtype
        assert found[name].dtype == plain[name].dtype == expected
    report_pooled(row, f"kernels/m2rnn-{lane.name}-{dtype}", found, plain, oracle, inputs=FLOATS)


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle, _ = m2rnn_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    assert ((m2rnn(**inputs)[0] - oracle).abs() <= bound).all()
    # The bound must separate a wrong recurrence from a correct one.
    wrong = {"W": inputs["W"].mT, "f": 1 - inputs["f"], "doc_ids": torch.zeros_like(inputs["doc_ids"])}
    for name, tensor in wrong.items():
        y, _ = m2rnn(**inputs | {name: tensor})
        assert ((y - oracle).abs() > bound).double().mean() > 0.2, name


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = make_inputs(B=2, T=5, H=2, K=3, V=2, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    assert torch.autograd.gradcheck(m2rnn, tensors)

    def truncated(*t: Tensor) -> tuple[Tensor, Tensor]:
        """A fault: the same values, without the gradient through the carried state."""
        y, final = m2rnn(*t)
        return y, final.detach() + 0 * t[0].sum()

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(truncated, tensors)


@lanes("cpu")
@quick
@given(T=st.integers(1, 40), V=st.integers(1, 5), start=st.integers(1, 40))
def test_values_and_gradients_equal_autograd_of_both_forms(lane: Lane, T: int, V: int, start: int):
    inputs = make_inputs(T=T, V=V, starts=(start,), device=lane.device, seed=T)
    found = results(m2rnn, inputs)
    assert worst(found, results(m2rnn_recurrent, inputs)) < 1e-12
    assert worst(found, results(partial(m2rnn, impl="reference"), inputs)) < 1e-12


@lanes("cpu")
def test_backward_computes_all_candidates_at_once(lane: Lane):
    inputs = make_inputs(T=20, dtype=torch.float32, device=lane.device)
    leaves = {n: t.requires_grad_(n in FLOATS) for n, t in inputs.items()}
    counts = []
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y, _ = m2rnn(**leaves)
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y.sum().backward()
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    assert counts == [20, 1]


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1))
def test_two_segments_with_carried_state_equal_one_run(lane: Lane, T: int, at: float):
    split = inner_token(T, at)

    def in_two(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        y0, state = m2rnn(**segment(inputs, slice(0, split), inputs["h0"]))
        state = carried(state, inputs["doc_ids"], split)
        y1, state = m2rnn(**segment(inputs, slice(split, T), state))
        return torch.cat((y0, y1), 1), state

    inputs = make_inputs(T=T, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert worst(results(in_two, inputs), results(m2rnn, inputs)) < 1e-13


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = make_inputs(T=20, starts=(7,), device=lane.device)
    whole, last = m2rnn(**inputs)
    _, state = m2rnn(**segment(inputs, slice(0, 19), inputs["h0"]))
    token = {n: inputs[n][:, -1] for n in ("q", "k", "v", "f")}
    y, state = m2rnn_step(**token, W=inputs["W"], state=state)
    assert worst({"y": y, "state": state}, {"y": whole[:, -1], "state": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 30), dtype=st.sampled_from([*DTYPES]))
def test_packed_document_equals_document_alone(lane: Lane, length: int, dtype: str):
    """[A|B] gives the same bits for B as B alone: a step sums in the same order wherever it is in the row.

    Only the read-out on a GPU rounds in another order: cuBLAS selects its kernel by the number of tokens.
    """
    inputs, others = (
        make_inputs(T=length + 20, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + i)
        for i in (0, 1)
    )
    inputs["doc_ids"][:, length:] += 1
    alone, alone_final = m2rnn(**segment(inputs, slice(length, None), None))
    packed, packed_final = m2rnn(**inputs)
    assert torch.equal(packed_final, alone_final)
    sums = inputs["q"][:, length:].double().abs().sum(-1, keepdim=True)  # no entry of h is above 1
    order = 0.0 if lane.device == "cpu" else 14 * 2**-24 * sums + torch.finfo(alone.dtype).eps * alone.abs()
    assert ((packed[:, length:].double() - alone).abs() <= order).all()

    mixed = spliced(others, inputs, length, PER_TOKEN[:-1])
    assert not torch.equal(m2rnn(**mixed)[0][:, :length], packed[:, :length])
    assert torch.equal(m2rnn(**mixed)[0][:, length:], packed[:, length:])

    leaves = {n: t.detach().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    m2rnn(**leaves)[0][:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in PER_TOKEN[:-1])
    assert leaves["h0"].grad.count_nonzero() == 0
    assert leaves["v"].grad[:, length:].count_nonzero() > 0


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1))
def test_future_tokens_do_not_affect_the_past(lane: Lane, T: int, at: float):
    now = inner_token(T, at)
    inputs = make_inputs(T=T, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    other = inputs | {n: inputs[n] * 3 + 1 for n in PER_TOKEN}
    later = spliced(inputs, other, now, PER_TOKEN)
    y, changed = m2rnn(**inputs)[0], m2rnn(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
def test_saturated_candidate_has_finite_correct_gradients(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    inputs["k"][:, 4::5] = 1e4
    inputs["f"][:, ::7] = 0.0
    inputs["f"][:, 1::7] = 1.0
    found = results(m2rnn, inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(m2rnn_recurrent, doubled(inputs))) < 1e-4


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = make_inputs(B=2, T=5, H=3, K=4, V=3, starts=(4,), dtype=torch.float32, device=lane.device)
    arguments = strided(inputs.values())
    y, final, states = FWD(*arguments)
    check_op(FWD, arguments, differentiable=True)
    check_op(BWD, (*arguments, *(turned(t, 0, 1) for t in (states, y, final))))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    batches = [make_inputs(B=B, T=6, dtype=torch.float32, device=lane.device) for B in (2, 3, 5)]
    check_one_graph(m2rnn, results, batches, op="m2rnn", dynamic=(*PER_TOKEN, "h0"))
    traced = traced_through(partial(m2rnn, impl="reference"), results, batches[-1])
    assert worst(traced, results(m2rnn, batches[-1])) < 1e-5


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "k must be"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T must be"),
    "W": (lambda i: {"W": i["W"][:, :1]}, "W has shape"),
    "state": (lambda i: {"h0": i["h0"].mT}, "h0 has shape"),
    "integer f": (lambda i: {"f": i["f"].int()}, "f must be floating"),
    "mixed dtypes": (lambda i: {"q": i["q"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
}


@lanes("cpu")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_error(lane: Lane, case: str):
    inputs = make_inputs(T=6)
    change, words = BAD[case]
    with refused("m2rnn", words):
        m2rnn(**{**inputs, **change(inputs)})
