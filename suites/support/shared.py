"""Values that several workers of one run need and one of them computes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return the directory `name` of this run and the result of make(directory), which must be JSON-serializable.

    The first worker that calls this runs `make` while the others wait; none may write into the directory afterwards. If
    `make` raises, the next caller tries again.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory, result = root / name, root / f"{name}.json"
    with FileLock(root / f"{name}.lock"):
        if not result.exists():
            directory.mkdir(exist_ok=True)
            value = make(directory)
            result.write_text(json.dumps(value))
    return directory, json.loads(result.read_text())
