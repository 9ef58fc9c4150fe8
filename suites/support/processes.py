"""Whether processes have ended, for tests of launchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def gone(pid: int) -> bool:
    """Return whether a process is dead, or a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()
