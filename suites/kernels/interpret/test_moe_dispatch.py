"""The Triton kernels of moe_dispatch under the interpreter, against the reference: the copy is bitwise equal.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import pytest
import torch

from kernels.moe_dispatch import kernel
from kernels.moe_dispatch.eager import moe_dispatch_eager
from suites.kernels.interpret.ops.moe_dispatch import OP, SIZES, routing, values
from suites.kernels.interpret.ratio import DTYPES
from suites.support.lanes import Lane, lanes


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", OP.dtypes)
def test_rows_slots_and_overflow_equal_reference(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    B, T, K, E, D, C = sizes
    x, expert = values(B, T, D, dtype=DTYPES[dtype]), routing(B, T, K, E)
    found = kernel.moe_dispatch_fwd_kernel(x, expert, E, C)
    expected = moe_dispatch_eager(x, expert, E, C)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
    assert (found[2] > 0) == (sizes in (SIZES[1], SIZES[3]))
