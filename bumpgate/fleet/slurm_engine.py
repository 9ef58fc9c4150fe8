"""The engine Slurm, by submitit: a task is a job, features are those of the nodes."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
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

# States of a node that can take a job, now or after another one; a suffix is a flag.
ALIVE = re.compile(r"(idle|mixed|allocated|completing|planned|reserved)[^*]*")
RULE = "-" * 22  # of submitit's messages


class SlurmEngine:
    """A Slurm cluster. folder: of submitit, on a file system that all hosts share. settings: of submitit.

    cluster: "local" runs the jobs as processes of this machine.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, str],
        cluster: str = "slurm",
        patience: float = PATIENCE,
    ) -> None:
        self._submitit: Any = need("submitit", command="--slurm", extra="fleet")
        self._folder = folder
        self._settings: dict[str, Any] = {n: int(v) if v.isdigit() else v for n, v in settings.items()}
        self._cluster = cluster
        self._patience = patience

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        if self._cluster == "local":
            return [Host(platform.node(), platform.node(), frozenset(needs))]
        try:
            done = subprocess.run(
                ["sinfo", "-N", "-h", "-o", "%N|%f|%T"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            raise FleetError(f"--slurm: sinfo failed: {one_line(why, 160)}") from None
        found = {}
        for line in done.stdout.splitlines():
            name, offered, state = line.split("|")
            if ALIVE.fullmatch(state):
                found[name] = Host(name, name, frozenset(offered.split(",")))
        return [found[name] for name in sorted(found) if found[name].features >= {*needs}]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        waiting = Waiting(self.hosts, self._patience)
        jobs = {number: (self._start(task), RETRIES) for number, task in enumerate(tasks)}
        try:
            while jobs:
                time.sleep(min(POLL_SECONDS, 0.2) if self._cluster == "local" else POLL_SECONDS)
                for number, (job, left) in [*jobs.items()]:
                    if job.done():
                        found = self._result(job)
                        if found is None and left:
                            jobs[number] = self._start(tasks[number]), left - 1
                            continue
                        del jobs[number]
                        yield number, found or Lost(f"its worker was lost {RETRIES + 1} times")
                    elif job.state == "PENDING" and (why := waiting.in_vain(tasks[number])):
                        job.cancel()
                        del jobs[number]
                        yield number, Lost(why)
        finally:
            for job, _ in jobs.values():
                job.cancel()

    def close(self) -> None:
        """Do nothing: run() cancels its own jobs."""

    def _start(self, task: Task) -> Any:
        executor = self._submitit.AutoExecutor(folder=self._folder, cluster=self._cluster)
        more: dict[str, Any] = {"exclusive": True}
        if task.host:
            more["nodelist"] = task.host
        executor.update_parameters(name="bumpgate", timeout_min=24 * 60)
        if self._cluster == "slurm":
            constraint = {"slurm_constraint": "&".join(task.needs)} if task.needs else {}
            executor.update_parameters(slurm_additional_parameters=more, **constraint, **self._settings)
        try:
            return executor.submit(attempt, task.function, task.arguments)
        except self._submitit.core.utils.FailedJobError as error:
            raise FleetError(f"--slurm: sbatch failed: {one_line(error, 160)}") from None

    def _result(self, job: Any) -> Done | Lost | None:
        """Return the result of a job that has ended; None if its worker was lost."""
        core = self._submitit.core.utils
        try:
            return finished(job.result())
        except core.FailedJobError as error:
            # The trace is between two rules.
            trace = str(error).partition(RULE)[2].partition(RULE)[0].strip() or str(error)
            return Lost(one_line(trace.splitlines()[-1], 200))
        except core.UncompletedJobError:
            return None
