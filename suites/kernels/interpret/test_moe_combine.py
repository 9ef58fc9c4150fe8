"""The Triton kernels of moe_combine under the interpreter: rows that are not read, and the dtype of the output."""

from __future__ import annotations

import torch

from kernels.moe_combine import kernel
from suites.ops import interpreted
from suites.ops.moe_combine import SIZES
from suites.support.lanes import Lane, lanes

OP = interpreted()["moe_combine"]


@lanes("cpu")
def test_dropped_and_unowned_rows_are_ignored(lane: Lane):
    inputs = OP.example("fp32", *SIZES[1])
    expected = OP.launched(**inputs)
    owned, dropped = expected[1].count_nonzero(-1) > 0, inputs["slot"] < 0
    assert dropped.any()
    assert not owned.all()
    inputs["y"].masked_fill_(~owned.unsqueeze(-1), torch.nan)
    inputs["weights"].masked_fill_(dropped, torch.inf)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(OP.launched(**inputs), expected))


@lanes("cpu")
def test_output_is_cast_once_at_the_end(lane: Lane):
    y, expert, slot, weights, C, _ = OP.example("fp16", *SIZES[1]).values()
    both = (torch.float32, torch.float16)
    wide, narrow = (kernel.moe_combine_fwd_kernel(y, expert, slot, weights, C, dtype) for dtype in both)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.half(), narrow)
    assert not torch.equal(wide, narrow.float())
