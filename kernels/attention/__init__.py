"""Grouped-query attention over packed documents, with rope and qk_norm as plain functions."""

from kernels.attention.eager import (
    attention_backward_eager,
    attention_eager,
    attention_mask,
    attention_step,
    qk_norm,
    rope,
)
from kernels.attention.op import attention

__all__ = [
    "attention",
    "attention_backward_eager",
    "attention_eager",
    "attention_mask",
    "attention_step",
    "qk_norm",
    "rope",
]
