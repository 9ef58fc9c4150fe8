"""The engine Ray: hosts are its nodes, features their custom resources, and lost workers its own retries.

Ray's client ends its process when the head of the cluster is lost, so it runs in a separate process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bumpgate.core.errors import need, one_line
from bumpgate.fleet.engine import (
    PATIENCE,
    POLL_SECONDS,
    RETRIES,
    Done,
    FleetError,
    Host,
    Lost,
    Task,
    Waiting,
    attempt,
    finished,
)

# A task takes this part of a feature, and one of the processors that the host offers.
SHARE = 0.001
# Seconds after which a head that does not answer is lost. Ray's default is 60.
RECONNECT = "15"
HOSTS, RUN = "hosts", "run"


class RayEngine:
    """A Ray cluster. address: `HOST:PORT` of its head."""

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        need("ray", command="--ray", extra="fleet")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_client, args=(theirs, address, patience), daemon=True)
        self._process.start()
        theirs.close()
        found = self._receive()
        if not found or found[0]:
            why = found[0] if found else "its head does not answer"
            raise FleetError(f"--ray {address}: no cluster there ({why})")

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        found = self._receive() if self._send(HOSTS, needs) else None
        return found[0] if found else []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        left = set(range(len(tasks)))
        alive = self._send(RUN, tasks)
        try:
            while left:
                found = self._receive() if alive else None
                if found is None:
                    break
                left.remove(found[0])
                yield found
            while left:
                yield left.pop(), Lost("the head of the cluster is lost")
        finally:
            if left:  # they end with the client
                self._process.kill()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def _send(self, *call: Any) -> bool:
        """Return whether the client is there to take a call."""
        try:
            self._pipe.send(call)
        except OSError:
            return False
        return True

    def _receive(self) -> Any:
        """Return the next answer of the client, a tuple; None if it has ended."""
        with suppress(EOFError, OSError):
            return self._pipe.recv()
        return None


def _client(pipe: Connection, address: str, patience: float) -> None:
    """Answer calls until the other end of the pipe is closed. Runs in a separate process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the other process handles it
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", RECONNECT)
    try:
        cluster = _Cluster(address, patience, pipe.poll)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, by version
        pipe.send((one_line(error, 160),))
        return
    pipe.send(("",))
    with suppress(EOFError, OSError):
        while True:
            name, argument = pipe.recv()
            if name == HOSTS:
                pipe.send((cluster.hosts(argument),))
                continue
            for found in cluster.run(argument):
                pipe.send(found)


class _Cluster:
    """Ray itself. abandoned: whether no one waits for the results any more."""

    def __init__(self, address: str, patience: float, abandoned: Callable[[], bool]) -> None:
        import ray

        self._ray: Any = ray
        self._patience = patience
        self._abandoned = abandoned
        self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR)

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        found = [
            Host(
                node["NodeManagerHostname"],
                node["NodeID"],
                frozenset(node["Resources"]),
                int(node["Resources"].get("CPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return sorted(
            (host for host in found if host.slots and host.features >= {*needs}),
            key=lambda h: (h.name, h.key),
        )

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        waiting = Waiting(self.hosts, self._patience)
        pending = {self._start(task): number for number, task in enumerate(tasks)}
        while pending and not self._abandoned():
            ended, _ = self._ray.wait([*pending], timeout=POLL_SECONDS)
            for ref in ended:
                yield pending.pop(ref), self._result(ref)
            if ended:
                continue
            for ref, number in [*pending.items()]:
                if why := waiting.in_vain(tasks[number]):
                    self._ray.cancel(ref, force=True)
                    del pending[ref]
                    yield number, Lost(why)

    def _start(self, task: Task) -> Any:
        strategies = self._ray.util.scheduling_strategies
        place = strategies.NodeAffinitySchedulingStrategy(task.host, soft=False) if task.host else "SPREAD"
        remote = self._ray.remote(on_worker).options(
            num_cpus=1,
            resources=dict.fromkeys(task.needs, SHARE),
            max_retries=RETRIES,
            scheduling_strategy=place,
        )
        return remote.remote(task.function, task.arguments)

    def _result(self, ref: Any) -> Done | Lost:
        try:
            return finished(self._ray.get(ref))
        except self._ray.exceptions.RayTaskError as error:
            return Lost(one_line(error.cause, 200))
        except self._ray.exceptions.RayError as error:
            return Lost(f"its worker was lost {RETRIES + 1} times: {one_line(error, 200)}")


def on_worker(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any, str]:
    """Attempt a call with the host's OMP_NUM_THREADS, which Ray sets to the number of processors of the task."""
    parent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if b"\0OMP_NUM_THREADS=" in b"\0" + parent:
        return attempt(function, arguments)
    changed = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        return attempt(function, arguments)
    finally:
        if changed is not None:
            os.environ["OMP_NUM_THREADS"] = changed
