"""Dispatch of tokens to padded expert buckets, one dispatch group per sequence."""

from kernels.moe_dispatch.op import moe_dispatch
from kernels.moe_dispatch.reference import (
    moe_dispatch_backward_reference,
    moe_dispatch_reference,
    moe_dispatch_slots,
)

__all__ = ["moe_dispatch", "moe_dispatch_backward_reference", "moe_dispatch_reference", "moe_dispatch_slots"]
