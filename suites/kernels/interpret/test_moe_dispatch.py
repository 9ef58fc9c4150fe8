"""The Triton kernels of moe_dispatch under the interpreter, against the reference: the copy is bitwise equal.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moe_dispatch import kernel
from kernels.moe_dispatch.eager import moe_dispatch_backward_reference, moe_dispatch_reference
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.lanes import Lane, lanes

SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]  # B T K E D C


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of assignments per sequence and of channels per row, the last not full."""
    for name in ("SLOTS_BLOCK", "ROWS_BLOCK", "BACKWARD_BLOCK"):
        monkeypatch.setattr(kernel, name, 16)


def routing(B: int, T: int, K: int, E: int) -> Tensor:
    """Return distinct experts per token, skewed to low ids for uneven buckets, with id 1 unassigned; strided."""
    g = torch.Generator().manual_seed(T)
    scores = torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)
    expert = scores.topk(K, -1).indices
    return expert.where(expert != 1, -1).repeat_interleave(2, -1)[..., ::2]


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_slots_and_overflow_equal_reference(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    B, T, K, E, D, C = sizes
    x, expert = values(B, T, D, dtype=DTYPES[dtype]), routing(B, T, K, E)
    found = kernel.moe_dispatch_fwd_kernel(x, expert, E, C)
    expected = moe_dispatch_reference(x, expert, E, C)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
    assert (found[2] > 0) == (sizes in (SIZES[1], SIZES[3]))


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_meets_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    B, T, K, E, D, C = sizes
    expert = routing(B, T, K, E)
    _, slot, _ = moe_dispatch_reference(torch.zeros(B, T, 1), expert, E, C)
    dpadded = values(E, B * C, D, dtype=DTYPES[dtype])
    found = kernel.moe_dispatch_bwd_kernel(dpadded, expert, slot, C)
    plain = moe_dispatch_backward_reference(dpadded, expert, slot, C)
    oracle = moe_dispatch_backward_reference(dpadded.double(), expert, slot, C)
    assert not outside([found], [plain], [oracle])
    if (slot < 0).any():
        leaking = kernel.moe_dispatch_bwd_kernel(dpadded, expert.clamp(min=0), slot.clamp(min=0), C)
        assert outside([leaking], [plain], [oracle])
