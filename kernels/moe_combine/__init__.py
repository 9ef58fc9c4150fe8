"""Weighted sum of expert outputs back into tokens, in fp32."""

from kernels.moe_combine.eager import moe_combine_backward_eager, moe_combine_eager
from kernels.moe_combine.op import moe_combine

__all__ = ["moe_combine", "moe_combine_backward_eager", "moe_combine_eager"]
