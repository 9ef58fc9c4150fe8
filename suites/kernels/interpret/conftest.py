"""Triton kernels run by Triton's interpreter, on CPU tensors.

The interpreter is selected for the whole process when triton is imported. So these files are collected only in a
process that was started for them: `TRITON_INTERPRET=1 pytest -m cpu -n 0 suites/kernels/interpret`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def masks_of_bool() -> Iterator[Callable[[], Any]]:
    """Let a broadcast comparison of two scalars be a mask in every version; yields a context with Triton's own masks.

    The interpreter gives such a mask the dtype of the scalars. Triton 3.9 refuses one of int32; earlier versions cast
    it. On a GPU it is of bool.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    released = InterpreterBuilder.create_splat

    def create_splat(builder: Any, shape: Any, value: Any) -> Any:
        made = released(builder, shape, value)
        if value.data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    with patch.object(InterpreterBuilder, "create_splat", create_splat):
        yield lambda: patch.object(InterpreterBuilder, "create_splat", released)


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the small blocks of the test's parameter `op`."""
    parameters = request.node.callspec.params
    if "op" in parameters and not getattr(parameters.get("case"), "gpu_blocks", False):
        for (module, name), size in parameters["op"].blocks.items():
            monkeypatch.setattr(module, name, size)
