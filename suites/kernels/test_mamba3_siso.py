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

from suites.ops import mamba3_mimo as mimo
from suites.ops import mamba3_siso as siso
from suites.ops.mamba3_siso import (
    SPEC,
    STATE,
    biased,
    make_inputs,
    run,
    scaled_k_in_mamba2,
    trapezoid,
)
from suites.ops.spec import on_circle
from suites.support.comparison import Named, doubled
from suites.support.lanes import Lane, lanes

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
@pytest.mark.parametrize("op", [siso, mimo], ids=lambda op: op.SPEC.name)
def test_small_lambda_keeps_its_precision(lane: Lane, op):
    """If lam is small, a token has little weight for itself: that weight must not be a difference of large numbers."""
    inputs = op.make_inputs(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= {n: torch.zeros_like(inputs[n]) for n in (*STATE, "D")}
    inputs["trap"] = inputs["trap"] - 12
    oracle = op.run(**doubled(inputs), impl="naive")[0][:, 0]
    assert ((op.run(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6
    if op is siso:
        assert ((published_form(inputs)[:, 0] - oracle) / oracle).abs().median() > 1e-4
