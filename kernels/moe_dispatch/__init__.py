"""Dispatch of tokens to padded expert buckets, one dispatch group per sequence."""

from kernels.moe_dispatch.eager import moe_dispatch_backward_eager, moe_dispatch_eager, moe_dispatch_slots
from kernels.moe_dispatch.op import moe_dispatch

__all__ = ["moe_dispatch", "moe_dispatch_backward_eager", "moe_dispatch_eager", "moe_dispatch_slots"]
