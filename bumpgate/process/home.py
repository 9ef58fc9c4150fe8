"""The folder of what can be made again: environments, wheels, compiled objects, kept runs."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return the folder of reproducible data: $BUMPGATE_HOME, else bumpgate/ in the user's cache."""
    chosen = os.environ.get("BUMPGATE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bumpgate"
