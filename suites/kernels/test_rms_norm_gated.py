"""rms_norm_gated against torch's own rms_norm: value, gradient, compilation, and properties of the formula.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm_gated import rms_norm_gated, rms_norm_gated_eager
from kernels.rms_norm_gated.naive import rms_norm_gated_naive
from suites.ops.rms_norm_gated import CASES, make_inputs
from suites.support.comparison import DTYPES, doubled, error, error_ratios, gradients, report_cases
from suites.support.custom_ops import check_op, strided
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_the_plain_formula(lane: Lane, dtype: str, row):
    inputs = make_inputs(dtype=DTYPES[dtype], device=lane.device)
    ratios = {
        case: error_ratios(rms_norm_gated, rms_norm_gated_naive, rms_norm_gated_naive, inputs, **options)
        for case, options in CASES.items()
    }
    report_cases(row, f"kernels/rms_norm_gated-{lane.name}-{dtype}", ratios, gradient_at_most=2.0)


@lanes("cpu", "h200")
@pytest.mark.parametrize("case", CASES)
def test_fp32_error_is_rounding_only(lane: Lane, case: str):
    """y is a product of single factors: relative to |y| a mean of S squares adds at most S/2 + 1 roundings (halved by
    the root), silu, root and products no more than 16.
    """
    x, gate, weight = inputs = make_inputs(dtype=torch.float32, device=lane.device)
    S = CASES[case]["group_size"] or 64
    oracle = rms_norm_gated_naive(*doubled(inputs), **CASES[case])
    bound = 2**-24 * (S / 2 + 17) * oracle.abs()
    assert ((rms_norm_gated(*inputs, **CASES[case]) - oracle).abs() <= bound).all()
    flipped = CASES[case] | {"norm_before_gate": not CASES[case]["norm_before_gate"]}
    wrong = {
        "norm and gate swapped": rms_norm_gated(*inputs, **flipped),
        "other groups": rms_norm_gated(*inputs, **CASES[case] | {"group_size": 8}),
        "gate negated": rms_norm_gated(x, -gate, weight, **CASES[case]),
        "no weight": rms_norm_gated(x, gate, torch.ones_like(weight), **CASES[case]),
        "eps a hundred times larger": rms_norm_gated(*inputs, eps=1e-3, **CASES[case]),
    }
    missed = [name for name, y in wrong.items() if ((y - oracle).abs() > bound).float().mean() < 0.5]
    assert not missed


@lanes("cpu", "h200")
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_op_contract(lane: Lane, shape: tuple[int, ...]):
    FWD, BWD = torch.ops.bumpgate.rms_norm_gated_fwd, torch.ops.bumpgate.rms_norm_gated_bwd
    x, gate, weight = strided(make_inputs(shape, D=6, dtype=torch.float32, device=lane.device))
    (dy,) = strided([x * 2])
    options = (1e-5, 3, False)
    check_op(FWD, (x, gate, weight, *options), differentiable=True)
    check_op(BWD, (x, gate, weight, dy, *options))


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
def test_mixed_input_dtypes_are_preserved(lane: Lane):
    """Under autocast the gate may be bf16 with fp32 inputs; in fp16 a mean square above 65504 stays finite."""
    x, gate, weight = make_inputs(dtype=torch.float32, device=lane.device)
    found = gradients(rms_norm_gated, x, gate.bfloat16(), weight)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    wide = rms_norm_gated_eager(x.double(), gate.bfloat16().double(), weight.double())
    torch.testing.assert_close(found[0].double(), wide, rtol=1e-5, atol=0)
    large = rms_norm_gated(x.half() * 5000, gate.half(), weight.half())
    assert large.isfinite().all()
    assert error(large, rms_norm_gated(x * 5000, gate, weight))[0] < 1e-2
