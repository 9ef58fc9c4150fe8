"""The Triton kernels of moe_dispatch under the interpreter, against the reference: the copy is bitwise equal.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

import pytest
import torch

from kernels.moe_dispatch import kernel
from kernels.moe_dispatch.eager import moe_dispatch_eager
from suites.ops import interpreted
from suites.ops.moe_dispatch import SIZES, null_routing
from suites.ops.spec import INTERPRETED_DTYPES
from suites.support.lanes import Lane, lanes

OP = interpreted()["moe_dispatch"]


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", OP.dtypes)
def test_rows_slots_and_overflow_equal_reference(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    B, T, K, E, D, C = sizes
    x, expert, _ = null_routing(B=B, T=T, K=K, E=E, D=D, C=C, dtype=INTERPRETED_DTYPES[dtype])
    found = kernel.moe_dispatch_fwd_kernel(x, expert, E, C)
    expected = moe_dispatch_eager(x, expert, E, C)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
    assert (found[2] > 0) == (sizes in (SIZES[1], SIZES[3]))
