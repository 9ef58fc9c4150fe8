"""Matrix products with the operands of a tensor core."""

from __future__ import annotations

import torch

from suites.support.instruments import EveryOperator


class OperandsIn(EveryOperator):
    """Compute fp32 matrix products like a tensor core: operands rounded to `dtype`, sums in fp32.

    The references multiply in fp32 for all input dtypes. A kernel for 16-bit inputs multiplies 16-bit operands, so its
    reference is the plain formula in the same dtype under this mode, forward and backward.
    """

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.PRODUCTS:
            *bias, a, b = args
            args = (*bias, *(t.to(self.dtype).to(t.dtype) if t.dtype == torch.float32 else t for t in (a, b)))
        return func(*args, **(kwargs or {}))
