"""Seconds of each test in its last run on this machine, by lane: from these the duration of a run is estimated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bumpgate.core.rows import write_atomic
from bumpgate.process.home import home


def path(lane: str) -> Path:
    """Return the file of a lane."""
    return home() / "seconds" / f"{lane}.json"


def load(lane: str) -> dict[str, float]:
    """Return node id -> seconds; empty if no run has saved them, or if the file is unreadable."""
    try:
        return {str(test): float(spent) for test, spent in json.loads(path(lane).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def save(lane: str, seconds: Mapping[str, float]) -> None:
    """Replace the seconds of a lane. Raises OSError."""
    path(lane).parent.mkdir(parents=True, exist_ok=True)
    rounded = {test: round(spent, 2) for test, spent in seconds.items()}
    write_atomic(path(lane), json.dumps(rounded, indent=0) + "\n")
