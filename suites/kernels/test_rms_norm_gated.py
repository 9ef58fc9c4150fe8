"""rms_norm_gated against torch's own rms_norm: value, gradient, compilation, and properties of the formula.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm_gated import rms_norm_gated
from suites.ops.rms_norm_gated import make_inputs
from suites.support.comparison import error
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), S=st.sampled_from([1, 2, 4, 8]), G=st.integers(1, 4), before=st.booleans())
def test_groups_equal_a_manual_split(lane: Lane, seed: int, S: int, G: int, before: bool):
    inputs = make_inputs(D=S * G, seed=seed, device=lane.device)
    found = rms_norm_gated(*inputs, group_size=S, norm_before_gate=before)
    parts = zip(*(t.split(S, -1) for t in inputs))
    split = torch.cat([rms_norm_gated(*part, norm_before_gate=before) for part in parts], -1)
    torch.testing.assert_close(found, split, rtol=1e-14, atol=0)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), level=st.sampled_from([40.0, 80.0]))
def test_open_gate_gives_the_plain_norm(lane: Lane, seed: int, level: float):
    """silu(g) = g to 1 part in e^40: before the norm it is divided out, after the norm it is a factor."""
    x, gate, weight = make_inputs(seed=seed, device=lane.device)
    gate = torch.full_like(gate, level)
    plain = F.rms_norm(x, (64,), weight, eps=0.0)
    torch.testing.assert_close(rms_norm_gated(x, gate, weight, eps=0.0), plain, rtol=1e-12, atol=0)
    last = rms_norm_gated(x, gate, weight, eps=0.0, norm_before_gate=True)
    torch.testing.assert_close(last / level, plain, rtol=1e-12, atol=0)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), factor=st.sampled_from([1e-6, 0.3, 1e6]), before=st.booleans())
def test_scale_of_x_has_no_effect_as_eps_vanishes(lane: Lane, seed: int, factor: float, before: bool):
    x, gate, weight = make_inputs(seed=seed, device=lane.device)
    function = partial(rms_norm_gated, gate=gate, weight=weight, norm_before_gate=before)
    torch.testing.assert_close(function(factor * x, eps=0.0), function(x, eps=0.0), rtol=1e-12, atol=0)
    assert error(function(1e-6 * x), function(x))[0] > 1e-2  # eps matters if it is not small


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), row=st.integers(0, 8))
def test_rows_are_independent(lane: Lane, seed: int, row: int):
    x, gate, weight = make_inputs((9,), dtype=torch.float32, seed=seed, device=lane.device)
    before = rms_norm_gated(x, gate, weight)
    x[row] += 1
    changed = (rms_norm_gated(x, gate, weight) != before).any(-1)
    assert changed.nonzero().flatten().tolist() == [row]


@lanes("cpu", "h200")
def test_mean_square_above_fp16_stays_finite(lane: Lane):
    x, gate, weight = make_inputs(dtype=torch.float32, device=lane.device)
    large = rms_norm_gated(x.half() * 5000, gate.half(), weight.half())
    assert large.isfinite().all()
    assert error(large, rms_norm_gated(x * 5000, gate, weight))[0] < 1e-2
