"""What a fleet needs of an engine. Placement, queues and transport are the engine's: nothing here schedules.

A host offers features: `lane_NAME` for each lane that it can run, `class_NAME` for its host class. A task names those
that it needs and runs on one host, alone: its processes, also those of both sides of a pair, are never on two hosts.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bumpgate.core.errors import BumpgateError, one_line

# How often a task is started again, elsewhere if possible, after its worker or host was lost.
RETRIES = 3
# Seconds between two looks at an engine that reports nothing.
POLL_SECONDS = 2.0
# Seconds without any host for a task, after which it is given up: a host that restarts comes back within these.
PATIENCE = 120.0


class FleetError(BumpgateError):
    """An engine that cannot be reached, or a call that no host can run. One line."""


@dataclass(frozen=True)
class Host:
    """One host. name: of the machine. key: the engine's name for it. features: what it offers. slots: tasks at once."""

    name: str
    key: str
    features: frozenset[str]
    slots: int = 1


@dataclass(frozen=True)
class Task:
    """A call on one host. function: importable there. needs: features of that host. host: key of the only one that may.

    Arguments and result are pickled. A task may run more than once.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()
    host: str = ""


@dataclass(frozen=True)
class Done:
    """host: the name of the machine that ran the task."""

    host: str
    value: Any


@dataclass(frozen=True)
class Lost:
    """A task without a result, and why: its hosts died, none offers what it needs, or it raised.

    refused: it raised BumpgateError, which it would anywhere.
    """

    why: str
    refused: bool = False


class Engine(Protocol):
    """Runs tasks on hosts."""

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        """Return the hosts that are alive and offer these features, by name."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the number of each task with its result, as they end; those left are cancelled with the iterator."""

    def close(self) -> None:
        """Leave the engine; tasks that still run are cancelled."""


def features(lane: str, host_class: str = "") -> tuple[str, ...]:
    """Return what a host must offer for a lane, and a class if there is one."""
    named = (("lane", lane), ("class", host_class))
    return tuple(f"{kind}_{re.sub(r'[^A-Za-z0-9]', '_', name)}" for kind, name in named if name)


def attempt(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any, str]:
    """Return (host, result, ""), or (host, None, reason) for a call that raised BumpgateError. Runs on a host.

    Not every exception can be pickled with its type.
    """
    try:
        return platform.node(), function(*arguments), ""
    except BumpgateError as error:
        return platform.node(), None, one_line(error, 400)


def finished(answer: tuple[str, Any, str]) -> Done | Lost:
    """Return the result of an attempt."""
    host, value, reason = answer
    return Lost(f"{host}: {reason}", refused=True) if reason else Done(host, value)


class Waiting:
    """Whether tasks that wait for a host still have one, with some patience."""

    def __init__(self, hosts: Callable[[Sequence[str]], list[Host]], patience: float = PATIENCE) -> None:
        self._hosts = hosts
        self._patience = patience
        self._since: dict[tuple[str, ...], float] = {}

    def in_vain(self, task: Task) -> str:
        """Return why a task cannot run, if that has been so for longer than the patience; else ""."""
        key = (*task.needs, task.host)
        there = [host for host in self._hosts(task.needs) if task.host in ("", host.key)]
        if there:
            self._since.pop(key, None)
            return ""
        seconds = time.monotonic() - self._since.setdefault(key, time.monotonic())
        what = " and ".join(task.needs) or "the task"
        return f"no host is left for {what}" if seconds >= self._patience else ""
