"""m2rnn: the error of the op against the token-by-token definition, and its backward; test_scans.py has its laws.

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
from torch.profiler import profile

from kernels.m2rnn import m2rnn, m2rnn_recurrent
from suites.ops.m2rnn import SPEC, make_inputs
from suites.support.comparison import DTYPES, Named, doubled, pooled, report_pooled, worst
from suites.support.instruments import present_activities
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

quick = settings(derandomize=True, max_examples=15, deadline=None)
results = SPEC.trained


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
        expected = seeds[0][{"y": "v", "final h0": "h0"}.get(name, name)].dtype
        assert found[name].dtype == plain[name].dtype == expected
    report_pooled(row, f"kernels/m2rnn-{lane.name}-{dtype}", found, plain, oracle, inputs=SPEC.floats)


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
@quick
@given(T=st.integers(1, 40), V=st.integers(1, 5), start=st.integers(1, 40))
def test_values_and_gradients_equal_autograd_of_both_forms(lane: Lane, T: int, V: int, start: int):
    inputs = make_inputs(T=T, V=V, starts=(start,), device=lane.device, seed=T)
    found = results(m2rnn, inputs)
    assert worst(found, results(m2rnn_recurrent, inputs)) < 1e-12
    assert worst(found, results(partial(m2rnn, impl="eager"), inputs)) < 1e-12


@lanes("cpu")
def test_backward_computes_all_candidates_at_once(lane: Lane):
    inputs = make_inputs(T=20, dtype=torch.float32, device=lane.device)
    leaves = {n: t.requires_grad_(n in SPEC.floats) for n, t in inputs.items()}
    counts = []
    with profile(activities=present_activities()) as trace:
        y, _ = m2rnn(**leaves)
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    with profile(activities=present_activities()) as trace:
        y.sum().backward()
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    assert counts == [20, 1]
