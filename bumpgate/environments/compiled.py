"""Compile caches of the two sides of a gate, one folder an environment and side, and their end.

An environment's caches go with it. Those of an interpreter that somebody handed in, which nobody can ask whether it
is still wanted, go after DAYS without a gate.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bumpgate.environments.store import home

DAYS = 30
# Independently filled caches of each side: what autotuning froze in one of them is not a property of the build.
COPIES = 2
HANDED_IN = "python-"


def caches() -> Path:
    """Their folder."""
    return home() / "compiled"


def variables(key: str, side: str, copy: int = 0) -> dict[str, str]:
    """Environment variables that point torch and Triton at the caches of one environment on one side.

    The same build gated against itself shares nothing either. key: of the environment, or HANDED_IN and the digest of
    an interpreter's path. copy: of several caches that are filled independently of each other.
    """
    top = caches() / f"{key}-{side}"
    place = top / f"copy{copy}" if copy else top
    place.mkdir(parents=True, exist_ok=True)
    (top / "used").touch()
    return {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": str(place / "triton")}


def copies(key: str, side: str) -> list[dict[str, str]]:
    """The variables of each of the COPIES caches."""
    return [variables(key, side, copy) for copy in range(COPIES)]


def prune(environments: set[str]) -> list[str]:
    """Deletes what belongs to none of these environments; the names of what is gone."""
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
