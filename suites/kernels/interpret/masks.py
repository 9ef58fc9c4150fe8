"""Masks in Triton's interpreter: a comparison of two scalars, broadcast to a tensor, keeps the dtype of the scalars.

Triton 3.9 refuses such a mask of int32; earlier versions cast it. On a GPU the mask is of bool.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

unpatched = InterpreterBuilder.create_splat


def _create_splat(builder: InterpreterBuilder, shape: Any, value: TensorHandle) -> TensorHandle:
    """Broadcast as Triton does; the result of a comparison stays a bool."""
    made = unpatched(builder, shape, value)
    if value.data.dtype == bool:
        made.data = made.data.astype(bool)
    return made


def of_bool() -> Any:
    """Return a context in which a broadcast comparison is a valid mask in every version."""
    return patch.object(InterpreterBuilder, "create_splat", _create_splat)


def as_released() -> Any:
    """Return a context with Triton's own broadcast."""
    return patch.object(InterpreterBuilder, "create_splat", unpatched)
