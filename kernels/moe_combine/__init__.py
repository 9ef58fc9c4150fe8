"""Weighted sum of expert outputs back into tokens, in fp32."""

from kernels.moe_combine.eager import moe_combine_backward_reference, moe_combine_reference
from kernels.moe_combine.op import moe_combine

__all__ = ["moe_combine", "moe_combine_backward_reference", "moe_combine_reference"]
