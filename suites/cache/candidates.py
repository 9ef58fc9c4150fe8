"""Planted autotuning candidates: what times one, in the autotuning subprocess or without it.

A module of their own, since a subprocess unpickles them by name and knows no function of a program run by -m.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def launcher_without_stream(*_: object, **__: object) -> float:
    """What a Triton launcher of another version raised for each candidate."""
    raise TypeError("launcher() got multiple values for argument 'stream'")


def infinite(*_: object, **__: object) -> float:
    """What a candidate that ran out of memory, or time, was reported as."""
    return float("inf")


def crash(*_: object, **__: object) -> float:
    """An illegal access, in whichever process this is timed."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def fast(*_: object, **__: object) -> float:
    """A sound candidate that wins every search."""
    return 1e-6


CANDIDATES: dict[str, Callable[..., float]] = {
    f.__name__: f for f in (launcher_without_stream, infinite, crash, fast)
}
