"""Grouped-query attention over packed documents, with rope and qk_norm as plain functions."""

from kernels.attention.op import attention
from kernels.attention.reference import (
    attention_backward_reference,
    attention_mask,
    attention_reference,
    attention_step,
    qk_norm,
    rope,
)

__all__ = [
    "attention",
    "attention_backward_reference",
    "attention_mask",
    "attention_reference",
    "attention_step",
    "qk_norm",
    "rope",
]
