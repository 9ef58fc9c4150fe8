"""What several workers of one run need and one of them makes."""

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
    """The directory `name` of this run and what make(directory) returned, which JSON must hold.

    The first worker that asks makes it while the others wait; none may write into the directory afterwards. Where
    `make` raises, the next that asks tries again.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory, result = root / name, root / f"{name}.json"
    with FileLock(root / f"{name}.lock"):
        if not result.exists():
            directory.mkdir(exist_ok=True)
            told = make(directory)
            result.write_text(json.dumps(told))
    return directory, json.loads(result.read_text())
