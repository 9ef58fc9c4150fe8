"""Paired session, in the measured process: two processes time the same work at once, on one core each.

A busy neighbour on this machine slows both at the same moment, so that it cancels in their ratio; processes that run
one after the other would be disturbed differently. The two exchange cores after every round, and several times a
second while they wait for processes that they started, so that a slow core cancels as well. (Bulej, Horky, Tuma,
Farquet, Prokopec 2020, "Duet benchmarking: improving measurement accuracy in the cloud", ICPE.)

`bumpgate gate` starts both and sets $BUMPGATE_DUET in each: the descriptor of a socket to the other one, and the two
sets of cores.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from bumpgate.plugin.rows import InfraError

VARIABLE = "BUMPGATE_DUET"
# The other side may compile everything before it is ready.
WAIT_SECONDS = 600
# How long the started processes of a side stay on its cores: with 0.25 s, short phases vary three times more.
EXCHANGE_SECONDS = 0.05


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
        _move(os.getpid(), own, self.cores)

    @contextmanager
    def children_change_places(self) -> Iterator[None]:
        """Move the processes that this one starts to the other cores every EXCHANGE_SECONDS, until the block ends.

        Both sides read the machine's clock, so they move at the same moment.
        """
        ended = threading.Event()
        mover = threading.Thread(target=self._move_children, args=(ended,), daemon=True)
        mover.start()
        try:
            yield
        finally:
            ended.set()
            mover.join()

    def _move_children(self, ended: threading.Event) -> None:
        import psutil

        this = psutil.Process()
        while not ended.wait(EXCHANGE_SECONDS - time.monotonic() % EXCHANGE_SECONDS):
            own = self.cores_at(self.cores, time.monotonic())
            for child in this.children(recursive=True):
                _move(child.pid, own, self.cores)

    @staticmethod
    def cores_at(cores: Sequence[Sequence[int]], now: float) -> Sequence[int]:
        """Return the set of cores that started processes use at this time of the machine's clock."""
        return cores[round(now / EXCHANGE_SECONDS) % len(cores)]

    def exchange(self, value: Any, what: str) -> Any:
        """Send a JSON value to the other side and return its value of the same name.

        Raises InfraError if the other side has ended, or is at another place: its test ended early.
        """
        place = f"{os.environ.get('PYTEST_CURRENT_TEST', '').rpartition(' ')[0]}: {what}"
        try:
            self.link.sendall(f"{json.dumps([place, value])}\n".encode())
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        except OSError as error:
            raise InfraError(f"the other side of this session gave no answer ({error})") from None
        if not line:
            raise InfraError("the other side of this session has ended")
        other, theirs = json.loads(line)
        if other != place:
            raise InfraError(f"the two sides of this session are at different places: {place} and {other}")
        return theirs

    def agree(self, value: Any, what: str) -> None:
        """Check that both sides pass the same value. Raises InfraError otherwise. what: its name in the message."""
        if (theirs := self.exchange(value, what)) != value:
            raise InfraError(f"the two sides of this session differ in {what}: {value} and {theirs}")


def _move(process: int, cores: Sequence[int], halves: Sequence[Sequence[int]]) -> None:
    """Move every thread of a process to these cores, each to as many as it uses now; some may end meanwhile.

    A thread that a program pinned to the second core of one half is pinned to the second one of the other.
    """
    places = {core: own for half in halves for core, own in zip(half, cores)}
    with suppress(FileNotFoundError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(ProcessLookupError):
                number = int(thread.name)
                moved = {places[core] for core in os.sched_getaffinity(number) if core in places}
                os.sched_setaffinity(number, moved or cores)


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


@contextmanager
def shared_cores() -> Iterator[None]:
    """In a paired session, let the processes that this one starts change places with the other side's."""
    duet = partner()
    with duet.children_change_places() if duet else nullcontext():
        yield
