"""m2rnn: the error of the op against the token-by-token definition, and its backward; test_scans.py has its laws.

B batch, T tokens, H heads, K key dim, V value dim.
The oracle is the recurrence in fp64, one step per token, differentiated by autograd. The op's forward is the same loop
with everything except the recurrence computed outside of it; its backward is derived by hand.
"""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from kernels.m2rnn import m2rnn, m2rnn_recurrent
from suites.ops.m2rnn import SPEC, make_inputs
from suites.support.comparison import worst
from suites.support.instruments import present_activities
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)
results = SPEC.trained


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
