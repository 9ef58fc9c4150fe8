"""mamba3_siso: the error of the chunked op against the token-by-token recurrence; test_scans.py has its laws.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation. A third one, the
published whole-sequence form, is written here, with two incorrect readings of it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from suites.ops.mamba3_siso import (
    SPEC,
    STATE,
    biased,
    make_inputs,
    recurrence,
    rounding_bound,
    run,
    scaled_k_in_mamba2,
    trapezoid,
)
from suites.ops.spec import on_circle
from suites.support.comparison import DTYPES, Named, doubled, pooled, report_pooled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

results = SPEC.trained


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
    inputs |= {n: torch.zeros_like(inputs[n]) for n in STATE}
    y, *_ = run(**inputs)
    assert (y - published_form(inputs)).abs().max() < 1e-11
    assert (y - published_form(inputs, diagonal=False)).abs().max() > 1
    still = inputs | {"angles": torch.zeros_like(inputs["angles"])}
    assert (run(**still)[0] - published_form(still)).abs().max() < 1e-11
    assert (run(**still)[0] - scaled_k_in_mamba2(still)).abs().max() > 1


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(recurrence, doubled(inputs)) for inputs in seeds)
    if lane.device == "cuda" and dtype != "fp32":  # a kernel there multiplies 16-bit operands
        with OperandsIn(DTYPES[dtype]):
            chunked = SPEC.of(16, impl="eager")
            plain = pooled(results(chunked, inputs) for inputs in seeds)
    else:
        plain = pooled(results(recurrence, inputs) for inputs in seeds)
    found = pooled(results(SPEC.of(16), inputs) for inputs in seeds)
    last_v = torch.cat([inputs["v"][:, -1].float().flatten() for inputs in seeds])
    assert torch.equal(found["final v_prev"], last_v)
    del oracle["final v_prev"]  # exact in all of them: there is no ratio
    report_pooled(row, f"kernels/mamba3_siso-{lane.name}-{dtype}", found, plain, oracle, inputs=SPEC.floats)


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle, *_ = recurrence(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, *_ = SPEC.of(chunk_size)(**inputs)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must separate a wrong scan from a correct one: no reset, and the angle not carried.
    unreset, *_ = run(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.1
    unturned, *_ = run(**inputs | {"theta": torch.zeros_like(inputs["theta"])})
    assert ((unturned - oracle).abs() > bound)[:, :10].double().mean() > 0.5


@lanes("cpu", "h200")
def test_small_lambda_keeps_its_precision(lane: Lane):
    """If lam is small, a token has little weight for itself: that weight must not be a difference of large numbers."""
    inputs = make_inputs(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= {n: torch.zeros_like(inputs[n]) for n in (*STATE, "D")}
    inputs["trap"] = inputs["trap"] - 12
    oracle = recurrence(**doubled(inputs))[0][:, 0]
    assert ((run(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6
    assert ((published_form(inputs)[:, 0] - oracle) / oracle).abs().median() > 1e-4
