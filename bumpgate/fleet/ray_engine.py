"""The engine Ray: hosts are its nodes, features their custom resources, and lost workers its own retries."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from bumpgate.report.extra import need
from bumpgate.rows import one_line

# A task takes this part of a feature, and one of the processors that the host offers.
SHARE = 0.001


class RayEngine:
    """A Ray cluster. address: `HOST:PORT` of its head."""

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        # Without it a driver waits a minute for a head that is gone.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
        self._ray: Any = need("ray", command="--ray", extra="fleet")
        self._patience = patience
        try:
            self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError, by version
            raise FleetError(f"--ray {address}: no cluster there ({one_line(error, 160)})") from None

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
        waiting = Waiting(self, self._patience)
        pending = {self._start(task): number for number, task in enumerate(tasks)}
        try:
            while pending:
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
        finally:
            for ref in pending:
                self._ray.cancel(ref, force=True)

    def close(self) -> None:
        self._ray.shutdown()

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
    """Attempt a call with the host's own number of threads, which Ray replaces by the processors that a task takes."""
    parent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if b"\0OMP_NUM_THREADS=" in b"\0" + parent:
        return attempt(function, arguments)
    changed = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        return attempt(function, arguments)
    finally:
        if changed is not None:
            os.environ["OMP_NUM_THREADS"] = changed
