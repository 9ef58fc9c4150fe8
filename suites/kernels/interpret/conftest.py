"""Triton kernels run by Triton's interpreter, on CPU tensors.

The interpreter is selected for the whole process when triton is imported. So these files are collected only in a
process that was started for them: `TRITON_INTERPRET=1 pytest -m cpu -n 0 suites/kernels/interpret`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def masks_of_bool() -> Iterator[None]:
    """Masks that every version of the interpreter accepts; see test_masks.py."""
    from suites.kernels.interpret.masks import of_bool

    with of_bool():
        yield


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the small blocks of the test's parameter `op`, or of its module's `OP`."""
    parameters = request.node.callspec.params
    op = parameters.get("op") or getattr(request.module, "OP", None)
    if op is not None and not getattr(parameters.get("case"), "gpu_blocks", False):
        for (module, name), size in op.blocks.items():
            monkeypatch.setattr(module, name, size)
