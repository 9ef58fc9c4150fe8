"""The folder of what can be made again: environments, wheels, compiled objects, kept runs, and the tests' durations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from bumpgate.core.rows import write_atomic


def home() -> Path:
    """Return the folder of reproducible data: $BUMPGATE_HOME, else bumpgate/ in the user's cache."""
    chosen = os.environ.get("BUMPGATE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bumpgate"


def durations_path(lane: str) -> Path:
    """Return the file with the seconds of each test of a lane in its last run, which estimate the next one."""
    return home() / "seconds" / f"{lane}.json"


def load_durations(lane: str) -> dict[str, float]:
    """Return node id -> seconds; empty if no run has saved them, or if the file is unreadable."""
    try:
        raw = json.loads(durations_path(lane).read_text())
        return {str(test): float(spent) for test, spent in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def save_durations(lane: str, seconds: Mapping[str, float]) -> None:
    """Replace the seconds of a lane. Raises OSError."""
    path = durations_path(lane)
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {test: round(spent, 2) for test, spent in seconds.items()}
    write_atomic(path, json.dumps(rounded, indent=0) + "\n")
