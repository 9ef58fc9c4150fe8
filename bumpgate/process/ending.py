"""How a process ended: by itself, by a signal, or at its time limit."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

# Signals that a program causes itself. Any other one was sent to it, and counts as the machine's.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")


class EndingKind(Enum):
    """EXIT: the process returned an exit code. TIMEOUT: it was stopped at its time limit."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Ending:
    """signal: its name, "" without one. limit: seconds that a stopped process had."""

    kind: EndingKind
    signal: str = ""
    limit: float = 0.0

    @property
    def crash(self) -> bool:
        return self.signal in CRASHES

    def __str__(self) -> str:
        """Describe an end that is not an exit: `died of SIGSEGV`, `no end within 60 s`; "" for an exit."""
        if self.kind is EndingKind.TIMEOUT:
            return f"no end within {self.limit:.0f} s"
        return f"died of {self.signal}" if self.signal else ""


def ending(code: int | None, seconds: float = 0.0, timeout: float | None = None) -> Ending:
    """Return how a process ended. code: its exit code, or minus the signal's number; None if it never ran.

    seconds, timeout: how long it ran, and its time limit.
    """
    if timeout is not None and seconds >= timeout:
        return Ending(EndingKind.TIMEOUT, limit=timeout)
    if code is None or code >= 0:
        return Ending(EndingKind.EXIT)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Ending(EndingKind.SIGNAL, name)
