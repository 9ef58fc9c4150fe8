"""A known defect of Triton's interpreter, which masks.py works around for the other tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from suites.kernels.interpret.masks import as_released
from suites.support.lanes import Lane, lanes

# Absent in 3.6.0, 3.7.1 and 3.8.0, present in 3.9.0.
MASK_REFUSED = "triton>=3.9,<3.10"
REFUSED = "mask has unsupported dtype"


@triton.jit
def _guarded_kernel(x_ptr, programs, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 1.0, mask=(i < N) & (tl.program_id(0) < programs))


def stored() -> Tensor:
    x = torch.zeros(8)
    _guarded_kernel[(1,)](x, 1, N=4, BLOCK=8)
    return x


@lanes("cpu")
def test_mask_with_a_comparison_of_scalars(lane: Lane, row) -> None:
    """Defect present: the store fails. With a comparison that stays a bool, as on a GPU, it works in every version."""
    expected = torch.tensor([1.0] * 4 + [0.0] * 4)
    assert torch.equal(stored(), expected)
    signature = ""
    with as_released():
        try:
            assert torch.equal(stored(), expected)
        except InterpreterError as error:
            signature = str(error)
            if REFUSED not in signature:
                raise
    row.defect(
        "kernels/control/mask_of_scalars_refused",
        bool(signature),
        known_in=MASK_REFUSED,
        reason="a comparison of two scalars, broadcast to a tensor, gets the dtype of the scalars in "
        "triton/runtime/interpreter.py (create_splat), and a load or store with such a mask is refused; workaround: "
        "suites/kernels/interpret/masks.py",
        witness=int(expected.sum()),
        rule="C36",
        evidence=[signature] if signature else [],
    )
