"""Compile caches of the two sides of a gate: one folder per environment and side, and their removal.

An environment's caches are removed with it. Those of a user's interpreter, whose lifetime is unknown, are removed
after DAYS without a gate.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bumpgate.process.home import home

DAYS = 30
# Independently filled caches of each side: autotuning choices frozen in one of them are not a property of the build.
COPIES = 2
HANDED_IN = "python-"


def caches() -> Path:
    return home() / "compiled"


def variables(key: str, side: str, copy: int = 0) -> dict[str, str]:
    """Return env_vars that point torch and Triton at the caches of one environment on one side.

    The two sides share no cache even if a build is gated against itself. key: of the environment, or HANDED_IN and the
    digest of an interpreter's path. copy: index of several independently filled caches.
    """
    top = caches() / f"{key}-{side}"
    place = top / f"copy{copy}" if copy else top
    place.mkdir(parents=True, exist_ok=True)
    (top / "used").touch()
    return {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": str(place / "triton")}


def copies(key: str, side: str) -> list[dict[str, str]]:
    """Return the env_vars of each of the COPIES caches."""
    return [variables(key, side, copy) for copy in range(COPIES)]


def bytecode(key: str, side: str, *, new: bool) -> dict[str, str]:
    """Return env_vars that store the bytecode of a user's interpreter in a folder next to its compile caches.

    new: delete the stored bytecode. Python recognises changed sources by their time and size alone, and a source of
    another image may have the same time, size and path.

    Without bytecode, or with PYTHONDONTWRITEBYTECODE, each process of that side compiles the sources of torch again.
    Environments that bumpgate built keep theirs inside (bumpgate.process.runner).
    """
    folder = caches() / f"{key}-{side}" / "bytecode"
    if new:
        shutil.rmtree(folder, ignore_errors=True)
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def prune(environments: set[str]) -> list[str]:
    """Delete the caches that belong to none of these environments; return the deleted names."""
    gone = []
    for place in sorted(caches().glob("*")):
        key = place.name.rpartition("-")[0]
        if key in environments or (key.startswith(HANDED_IN) and _used_lately(place)):
            continue
        shutil.rmtree(place, ignore_errors=True)
        gone.append(place.name)
    return gone


def _used_lately(place: Path) -> bool:
    try:
        return time.time() - (place / "used").stat().st_mtime < DAYS * 86400
    except OSError:
        return False
