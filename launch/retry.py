"""A launcher that retries a failed run once: python -m launch.retry [--ranks N] -- -m launch.train ...

The last traceback of the first launch is classified by bumpgate.logs. Only the families of [retry.error] are retried,
only if training had not begun, and once. A retry applies four patches: the debug level in the environment (here) and in
the process, lazy groups and the skipped barrier (launch/dist/process_group.py). The last line on standard output is the
run's, or its first rank's.

Exit codes: the run's own, 1 if it was killed or stopped, 2 bad options, 3 a contradiction of the contract, 128 and the
number of the signal that stopped the launcher (143 for SIGTERM).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bumpgate.logs import TRACEBACK, classify, load_families
from launch.children import Child, ChildError, run
from launch.contract import PATH, ContractError, section
from launch.environment import REFUSED, RETRY, RUN

REASON = "BUMPGATE_RETRY_REASON"  # in a retry's environment: the log class of the first failure
BEGUN = "BUMPGATE_BEGUN"  # path of a file that a run creates once training has begun: failures are then final
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
THREADS = "OMP_NUM_THREADS"
PORTS = range(16384, 32768)
LAZY_GROUPS = ("cuda", "listed")
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Retry:
    """[retry] of the contract. errors: log class -> whether its retry creates lazy groups on any device."""

    times: int
    last_step: int
    debug_level: str
    lazy_groups: str
    skip_barrier: str
    errors: Mapping[str, bool]


def load_retry(path: Path = PATH) -> Retry:
    """Load [retry]. Raises ContractError, one line, on a malformed table or an error that is not an alerting class."""

    def build(table: dict) -> Retry:
        values = {name: line["value"] for name, line in table.items() if name != "error" and line["reason"]}
        values["errors"] = {name: line.get("lazy", False) for name, line in table["error"].items()}
        return Retry(**values)

    retry = section("retry", build, path)
    alerts = {c.name for c in load_families() if c.action == "alert"}
    if unknown := sorted(set(retry.errors) - alerts):
        raise ContractError(
            f"{path.name}: [retry.error.{unknown[0]}] is no family of bumpgate/logs that alerts"
        )
    if retry.lazy_groups not in LAZY_GROUPS or retry.skip_barrier != "expert_parallel":
        raise ContractError(f"{path.name}: [retry] lazy_groups or skip_barrier has an unknown value")
    return retry


def failure(tail: Sequence[str]) -> tuple[str, ...]:
    """Return the alerting log classes of a child's last traceback, or of all its last lines if it printed none."""
    begins = [i for i, line in enumerate(tail) if line.startswith(TRACEBACK)]
    report = classify(line + "\n" for line in tail[begins[-1] if begins else 0 :])
    return tuple(f.family.name for f in report.findings if f.alert)


def relaunch(
    retry: Retry, error: ChildError, given: Mapping[str, str], begun: bool
) -> tuple[dict[str, str] | None, str]:
    """Return the environment of the second launch, or None, and the reason as text."""
    if len(classes := failure(error.tail)) != 1 or classes[0] not in retry.errors:
        return None, f"{' and '.join(classes) or 'no known error'}: not listed"
    if begun:
        return None, f"{classes[0]} after step {retry.last_step}: training had begun"
    if (before := int(given.get(RETRY) or 0)) >= retry.times:
        return None, f"{classes[0]} again in launch {before + 1}"
    changed = {**given, RETRY: str(before + 1), REASON: classes[0]}
    return quiet_environment(retry, changed), classes[0]


def quiet_environment(retry: Retry, given: Mapping[str, str]) -> dict[str, str]:
    """Patch 1: replace debug level DETAIL by the contract's before the new process and its children read it."""
    return {**given, DEBUG: retry.debug_level} if given.get(DEBUG, "").upper() == "DETAIL" else dict(given)


def passed(step: int, last_step: int, given: Mapping[str, str] = os.environ) -> None:
    """Called by a run after each step, counted from 0 in this process; from `last_step` on a failure is final."""
    if step >= last_step and given.get(BEGUN):
        Path(given[BEGUN]).touch()  # the file's modification time is the time of the last step


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process listens on, and below those that outgoing connections get."""
    while True:
        port = secrets.randbelow(PORTS.stop - PORTS.start) + PORTS.start
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def ranks(count: int, command: Sequence[str], given: Mapping[str, str]) -> list[Child]:
    """One child per rank that runs `command` with this Python; on a fresh port, so that no stale rank joins them.

    The ranks share the host's cores: with a thread per core in each, they wait for each other in spinning threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared = {THREADS: str(max(1, cores // count)), **given, **meet}
    return [
        Child(f"rank{r}", [sys.executable, *command], {**shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(count)
    ]


class Stall:
    """Call it regularly: what is wrong if training has begun and no rank has passed a step for `seconds`, else "".

    Measured by the monotonic clock: the system's may be set.
    """

    def __init__(self, begun: Path, seconds: float) -> None:
        self.begun, self.seconds = begun, seconds
        self.passed, self.since = -1, 0.0

    def __call__(self) -> str:
        with suppress(FileNotFoundError):
            passed, now = self.begun.stat().st_mtime_ns, time.monotonic()
            if passed != self.passed:
                self.passed, self.since = passed, now
            elif now - self.since > self.seconds:
                return f"no step for {self.seconds:g} s"
        return ""


@contextmanager
def noted_stops() -> Iterator[list[int]]:
    """Yield a list that receives the stop signals of this process, but not those that it ignores (nohup).

    A handler that raised could interrupt the start or the end of a child, and leave it running.
    """
    received: list[int] = []
    before = {n: h for n in STOPS if (h := signal.getsignal(n)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda n, _: received.append(n))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    count: int,
    command: Sequence[str],
    given: Mapping[str, str],
    *,
    seconds: float,
    log: Path,
    stall: float = float("inf"),
    stops: Sequence[int] = (),
) -> int:
    """Launch, and retry if the contract allows it -> exit code. 0 ranks: one process, not distributed.

    stall: the longest time between two steps, in seconds, once training has begun.
    stops: receives the signals that stop the launch.
    """
    retry, environment = load_retry(), dict(given)
    with tempfile.TemporaryDirectory() as place:
        begun = Path(place) / "begun"
        no_step = Stall(begun, stall)
        while True:
            env_vars = {**environment, BEGUN: str(begun)}
            single = [Child("run", [sys.executable, *command], env_vars)]
            children = ranks(count, command, env_vars) if count else single
            try:
                tails = run(
                    children, seconds=seconds, log=log, check=lambda: "stopped" if stops else no_step()
                )
                print(*next(iter(tails.values()))[-1:])
                return 0
            except ChildError as error:
                if stops:
                    return 128 + stops[0]
                second, why = relaunch(retry, error, environment, begun.exists())
                word = "launched again" if second else "final"
                print(f"{word}: {why}; {error}", file=sys.stderr, flush=True)
                if second is None:
                    return error.code if error.code and error.code > 0 else 1
                environment = second


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m launch.retry", description=__doc__.split("\n", 1)[0])
    add, never = p.add_argument, float("inf")
    add("--ranks", type=int, default=0, help="processes on this host; 0: one process that is not a rank")
    add("--seconds", type=float, default=never, help="time limit of a launch, in seconds (default: none)")
    add("--stall", type=float, default=never, help="time limit between two steps, in seconds (default: none)")
    add("--run", default="", help="name of the run, whose compile caches are then its own")
    add("--log", type=Path, required=True, help="every line of every launch, prefixed with its rank")
    add("command", nargs="+", help="arguments of Python: -m launch.train ...")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    o = parser().parse_args(arguments)
    given = {**os.environ, **({RUN: o.run} if o.run else {})}
    limits = {"seconds": o.seconds, "stall": o.stall}
    try:
        with noted_stops() as stops:
            return supervise(o.ranks, o.command, given, log=o.log, stops=stops, **limits)
    except ContractError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
