"""Fault candidates for autotuning: replacements of the benchmark function, in the autotuning subprocess or without it.

They need a separate module: a subprocess unpickles them by name and cannot import functions of a -m program.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def launcher_without_stream(*_: object, **__: object) -> float:
    """Raise what a Triton launcher of another version raised for each candidate."""
    raise TypeError("launcher() got multiple values for argument 'stream'")


def infinite(*_: object, **__: object) -> float:
    """Return an infinite time, as reported for a candidate that ran out of memory or time."""
    return float("inf")


def crash(*_: object, **__: object) -> float:
    """Fail with an illegal access in the process that times the candidate."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def fast(*_: object, **__: object) -> float:
    """Return the time of a valid candidate that wins every search."""
    return 1e-6


CANDIDATES: dict[str, Callable[..., float]] = {
    f.__name__: f for f in (launcher_without_stream, infinite, crash, fast)
}
