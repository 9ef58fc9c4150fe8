"""The other side of a paired session: two processes that time the same work at once, a core each.

A busy neighbour of this machine slows both in the same moment, so that it cancels in their ratio, where processes
that run one after the other would each meet another hour. After every round the two change places, so that what
one core suffers cancels as well. (Bulej, Horky, Tuma, Farquet, Prokopec 2020, "Duet benchmarking: improving
measurement accuracy in the cloud", ICPE.)

`bumpgate gate` starts both and hands each $BUMPGATE_DUET: the descriptor of a socket to the other one, and the two
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
    """One of the two. cores: those of the first round and those of the second."""

    def __init__(self, link: socket.socket, cores: Sequence[Sequence[int]], leads: bool) -> None:
        self.link, self.cores, self.leads = link, cores, leads
        link.settimeout(WAIT_SECONDS)
        self._lines = link.makefile("r", encoding="utf-8")
        self.change_places()

    def change_places(self) -> None:
        """Moves every thread of this process to the other cores; torch's pool stays as wide as one side's share."""
        here, self.cores = self.cores[0], [*self.cores[1:], self.cores[0]]
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), here)

    def exchange(self, told: Any) -> Any:
        """Tells the other side something and waits for what it tells. Raises InfraError where it has ended."""
        try:
            self.link.sendall(f"{json.dumps(told)}\n".encode())
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        except OSError as error:
            raise InfraError(f"the other side of this session gave no answer ({error})") from None
        if not line:
            raise InfraError("the other side of this session has ended")
        return json.loads(line)

    def agree(self, told: Any, what: str) -> None:
        """Both sides are at the same place. Raises InfraError where they are not."""
        if (theirs := self.exchange(told)) != told:
            raise InfraError(f"the two sides of this session differ in {what}: {told} and {theirs}")


@lru_cache(maxsize=1)
def partner() -> Duet | None:
    """The duet that this process belongs to, joined at the first call; None in every other process.

    The first call comes before torch: its thread pools are as wide as the cores that it finds.
    """
    if VARIABLE not in os.environ:
        return None
    told = json.loads(os.environ.pop(VARIABLE))
    os.set_inheritable(told["socket"], False)
    return Duet(socket.socket(fileno=told["socket"]), told["cores"], told["leads"])
