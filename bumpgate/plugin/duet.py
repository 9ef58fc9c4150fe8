"""Paired session, in the measured process: two processes time the same work at once, on one core each.

A busy neighbour on this machine slows both at the same moment, so that it cancels in their ratio; processes that run
one after the other would be disturbed differently. The two exchange cores after every round, so that a slow core
cancels as well. (Bulej, Horky, Tuma, Farquet, Prokopec 2020, "Duet benchmarking: improving measurement accuracy in
the cloud", ICPE.)

`bumpgate gate` starts both and sets $BUMPGATE_DUET in each: the descriptor of a socket to the other one, and the two
sets of cores.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bumpgate.plugin.rows import InfraError

VARIABLE = "BUMPGATE_DUET"
# The other side may compile everything before it is ready.
WAIT_SECONDS = 600


class Duet:
    """One of the two processes. cores: those of the first round and those of the second."""

    def __init__(self, link: socket.socket, cores: Sequence[Sequence[int]], leads: bool) -> None:
        self.link, self.cores, self.leads = link, cores, leads
        link.settimeout(WAIT_SECONDS)
        self._lines = link.makefile("r", encoding="utf-8")
        self.change_places()

    def change_places(self) -> None:
        """Move every thread of this process to the other cores; torch's pool keeps the size of one side's share."""
        own, self.cores = self.cores[0], [*self.cores[1:], self.cores[0]]
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), own)

    def exchange(self, value: Any) -> Any:
        """Send a JSON value to the other side and return its reply. Raises InfraError if the other side has ended."""
        try:
            self.link.sendall(f"{json.dumps(value)}\n".encode())
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        except OSError as error:
            raise InfraError(f"the other side of this session gave no answer ({error})") from None
        if not line:
            raise InfraError("the other side of this session has ended")
        return json.loads(line)

    def agree(self, value: Any, what: str) -> None:
        """Check that both sides pass the same value. Raises InfraError otherwise. what: its name in the message."""
        if (theirs := self.exchange(value)) != value:
            raise InfraError(f"the two sides of this session differ in {what}: {value} and {theirs}")


@lru_cache(maxsize=1)
def partner() -> Duet | None:
    """Return this process's duet, joined at the first call; None outside of a duet.

    The first call must come before torch is imported, which sizes its thread pools by the available cores.
    """
    if VARIABLE not in os.environ:
        return None
    settings = json.loads(os.environ.pop(VARIABLE))
    os.set_inheritable(settings["socket"], False)
    return Duet(socket.socket(fileno=settings["socket"]), settings["cores"], settings["leads"])
