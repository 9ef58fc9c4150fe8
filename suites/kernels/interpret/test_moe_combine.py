"""The Triton kernels of moe_combine under the interpreter, against the reference in fp64.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moe_combine import kernel
from kernels.moe_combine.eager import moe_combine_backward_reference, moe_combine_reference
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]  # B T K E D C
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of assignments per sequence and of channels per row, the last not full."""
    for name in ("FORWARD_BLOCK", "BACKWARD_BLOCK", "OWNERS_BLOCK"):
        monkeypatch.setattr(kernel, name, 16)


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return y, expert, slot, weights, dout. Slots in token order, -1 if the bucket is full; noise in unused rows."""
    B, T, K, E, D, C = sizes
    g = torch.Generator().manual_seed(T)
    expert = (torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)).topk(K, -1).indices
    mine = expert.flatten(1).unsqueeze(-1) == torch.arange(E)
    slot = (mine.cumsum(1) - 1).gather(2, expert.flatten(1).unsqueeze(-1)).view_as(expert)
    slot = slot.where(slot < C, -1)
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    dout = torch.randn(B, T, 2 * D, generator=g, dtype=torch.float64).to(dtype)[..., ::2]
    return y, expert, slot, torch.rand(B, T, K, generator=g), dout


def reference(y, expert, slot, weights, dout, C: int) -> tuple[Tensor, ...]:
    forward = moe_combine_reference(y, expert, slot, weights, C)
    return forward, *moe_combine_backward_reference(y, expert, slot, weights, C, dout)


def launched(y, expert, slot, weights, dout, C: int) -> tuple[Tensor, ...]:
    forward = kernel.moe_combine_fwd_kernel(y, expert, slot, weights, C, y.dtype)
    return forward, *kernel.moe_combine_bwd_kernel(y, expert, slot, weights, C, dout)


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    inputs, C = make_inputs(sizes, DTYPES[dtype]), sizes[-1]
    oracle, plain = reference(*doubled(inputs), C), reference(*inputs, C)
    assert not outside(launched(*inputs, C), plain, oracle)

    y, expert, slot, weights, dout = inputs
    if (slot < 0).any():
        leaking = launched(y, expert, slot.clamp(min=0), weights, dout, C)
        assert len({line.split(":")[0] for line in outside(leaking, plain, oracle)}) == 3


@lanes("cpu")
def test_dropped_and_unowned_rows_are_ignored(lane: Lane):
    y, expert, slot, weights, dout = make_inputs(SIZES[1], torch.float32)
    C = SIZES[1][-1]
    expected = launched(y, expert, slot, weights, dout, C)
    owned = expected[1].count_nonzero(-1) > 0
    assert (slot < 0).any()
    assert not owned.all()
    y = y.masked_fill(~owned.unsqueeze(-1), torch.nan)
    found = launched(y, expert, slot, weights.masked_fill(slot < 0, torch.inf), dout, C)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))


@lanes("cpu")
def test_output_is_cast_once_at_the_end(lane: Lane):
    y, expert, slot, weights, _ = make_inputs(SIZES[1], torch.float16)
    both = (torch.float32, torch.float16)
    wide, narrow = (kernel.moe_combine_fwd_kernel(y, expert, slot, weights, 5, dtype) for dtype in both)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.half(), narrow)
    assert not torch.equal(wide, narrow.float())
