"""The Triton kernels of m2rnn under the interpreter: the range of tanh.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch

from suites.ops import interpreted
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

OP = interpreted()["m2rnn"]


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_small_and_saturated_candidates_are_accurate(lane: Lane, dtype: str):
    """tanh from 1e-6, where the exponential alone would cancel, to where it is 1 and its slope 0."""
    inputs = OP.example(dtype, 1, 24, 1, 4, 4)
    inputs["k"] = torch.logspace(-6, 4, 24).view(1, 24, 1, 1).to(inputs["k"]) * inputs["k"]
    inputs |= {"v": inputs["v"].sign(), "h0": torch.zeros_like(inputs["h0"])}
    found, oracle = OP.launched(**inputs), OP.reference(**doubled(inputs))
    broken = OP.rule([inputs])([found])
    assert not broken
    first = (found[2].double() / oracle[2] - 1)[:, 0].abs().max()
    assert first < 16 * torch.finfo(found[2].dtype).eps
