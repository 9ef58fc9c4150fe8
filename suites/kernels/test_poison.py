"""The other tests of this folder see NaN where an op leaves its output unwritten; here that is shown to be so."""

from __future__ import annotations

import torch

from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
def test_memory_that_nobody_wrote_is_nan(lane: Lane):
    like = torch.ones(5, device=lane.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = like.to(dtype)
        for fresh in (
            torch.empty(5, dtype=dtype, device=lane.device),
            given.new_empty(5),
            torch.empty_like(given),
        ):
            assert fresh.isnan().all()
    assert (torch.empty(5, dtype=torch.int32, device=lane.device) == torch.iinfo(torch.int32).max).all()
