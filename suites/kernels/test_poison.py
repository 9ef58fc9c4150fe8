"""The other tests of this folder see NaN where an op leaves an output or a gradient unwritten, whichever it is.

Here: unwritten memory is NaN, and the error ratio of a tensor with one NaN is NaN. tests/suites/test_non_finite.py
shows op by op, for the last tensor of the last case, that each row is then red.
"""

from __future__ import annotations

import math

import torch

from suites.support.comparison import error_ratio
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
def test_unwritten_memory_is_nan(lane: Lane):
    like = torch.ones(5, device=lane.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = like.to(dtype)
        for fresh in (
            torch.empty(5, dtype=dtype, device=lane.device),
            given.new_empty(5),
            torch.empty_like(given),
        ):
            assert fresh.isnan().all()
            written = given.clone()
            written[-1:] = fresh[-1:]
            assert math.isnan(error_ratio(written, given + 1, given))
    assert (torch.empty(5, dtype=torch.int32, device=lane.device) == torch.iinfo(torch.int32).max).all()
