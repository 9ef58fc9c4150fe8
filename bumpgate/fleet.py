"""`bumpgate fleet`: gates and bisects on the hosts of a Ray cluster.

Ray places, queues and transports; nothing here schedules. A host offers the custom resource `lane_NAME` for each lane
that it can run. A task runs on one host, alone: the processes of both sides of a pair are never on two hosts.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.bisect import command as bisect_command
from bumpgate.bisect.bisection import MachineError
from bumpgate.bisect.options import BisectError, Options
from bumpgate.bisect.probe import READING, Cause, Reading, keep, load, take
from bumpgate.core.command_line import takes
from bumpgate.core.errors import BumpgateError, need, one_line
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import write_atomic
from bumpgate.env.request import Request
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.state import NAME
from bumpgate.process.child import last_line, run_child
from bumpgate.process.home import home

# How often a task is started again, elsewhere if possible, after its worker or host was lost.
RETRIES = 3
# Seconds between two looks at a cluster that reports nothing.
POLL_SECONDS = 2.0
# Seconds without any host for a task, after which it is lost: a host that restarts comes back within these.
PATIENCE = 120.0
# A task takes this part of its lane's resource, and one of the processors that the host offers.
SHARE = 0.001
# Seconds after which a head that does not answer is lost. Ray's default is 60.
RECONNECT = "15"
# A longer log of a task keeps its end, where it has its reason. A part of a JSON document is none.
LONGEST = 32 << 20
LOG, BAD_INPUT = "fleet.log", 4
MAIN = "from bumpgate.cli import main; main()"

app = typer.Typer(no_args_is_help=True)


class FleetError(BumpgateError):
    """A cluster that cannot be reached, or a call that no host can run. One line."""


@dataclass(frozen=True)
class Task:
    """A call on one host that offers the lane, "" for any host. It is pickled, and may run more than once."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    lane: str = ""


@dataclass(frozen=True)
class Done:
    """The result of a task. host: the name of the machine that ran it."""

    host: str
    value: Any


@dataclass(frozen=True)
class Lost:
    """A task without a result, and why. refused: it raised BumpgateError, which it would on any host."""

    why: str
    refused: bool = False


class Cluster:
    """A Ray cluster. address: `HOST:PORT` of its head. Raises FleetError if there is none.

    Ray's client ends its process when the head of the cluster is lost, so it runs in a separate process.
    """

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        need("ray", command="--ray", extra="fleet")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_client, args=(theirs, address, patience), daemon=True)
        self._process.start()
        theirs.close()
        if why := next(self._answers(None), "its head does not answer"):
            raise FleetError(f"--ray {address}: no cluster there ({why})")

    def slots(self, lane: str) -> int:
        """Return how many tasks of a lane can run at once."""
        return next(self._answers(lane), 0)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the number of each task with its result, as they end; those left are cancelled with the iterator."""
        left = set(range(len(tasks)))
        answers = self._answers(tasks)
        try:
            while left and (found := next(answers, None)):
                left.remove(found[0])
                yield found
            while left:
                yield left.pop(), Lost("the head of the cluster is lost")
        finally:
            if left:  # they end with the client
                self._process.kill()

    def close(self) -> None:
        """Leave the cluster; tasks that still run are cancelled."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def _answers(self, call: str | Sequence[Task] | None) -> Iterator[Any]:
        """Send a call to the client, if there is one, and yield its answers until the client ends."""
        with suppress(EOFError, OSError):
            if call is not None:
                self._pipe.send(call)
            while True:
                yield self._pipe.recv()


def _client(pipe: Connection, address: str, patience: float) -> None:
    """Connect, then answer calls until the other end of the pipe is closed. Runs in a separate process."""
    import ray

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the other process handles it
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", RECONNECT)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, by version
        pipe.send(one_line(error, 160))
        return
    pipe.send("")
    with suppress(EOFError, OSError):
        while True:
            call = pipe.recv()
            lane = isinstance(call, str)
            for found in [_slots(ray, call)] if lane else _run(ray, call, patience, pipe.poll):
                pipe.send(found)


def _resource(lane: str) -> str:
    return f"lane_{re.sub(r'[^A-Za-z0-9]', '_', lane)}" if lane else "CPU"


def _slots(ray: Any, lane: str) -> int:
    offered = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(resources.get("CPU", 0)) for resources in offered if _resource(lane) in resources)


def _run(
    ray: Any, tasks: Sequence[Task], patience: float, abandoned: Callable[[], bool]
) -> Iterator[tuple[int, Done | Lost]]:
    """Run tasks on a cluster, until no one waits for their results any more."""
    remote = ray.remote(on_worker)
    pending = {}
    for number, task in enumerate(tasks):
        needs = {_resource(task.lane): SHARE} if task.lane else {}
        options = {"num_cpus": 1, "resources": needs, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        pending[remote.options(**options).remote(task.function, task.arguments)] = number
    waiting: dict[str, float] = {}  # lane -> since when no host offers it
    while pending and not abandoned():
        ended, _ = ray.wait([*pending], timeout=POLL_SECONDS)
        for ref in ended:
            yield pending.pop(ref), _result(ray, ref)
        for ref, number in [] if ended else [*pending.items()]:
            lane = tasks[number].lane
            if _slots(ray, lane):
                waiting.pop(lane, None)
            elif time.monotonic() - waiting.setdefault(lane, time.monotonic()) >= patience:
                ray.cancel(ref, force=True)
                del pending[ref]
                yield number, Lost(f"no host is left for {_resource(lane)}")


def _result(ray: Any, ref: Any) -> Done | Lost:
    try:
        found: Done | Lost = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return Lost(one_line(error.cause, 200))
    except ray.exceptions.RayError as error:
        return Lost(f"its worker was lost {RETRIES + 1} times: {one_line(error, 200)}")
    return found


def on_worker(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Done | Lost:
    """Call a function on a host. Not every exception can be pickled with its type, so BumpgateError is returned."""
    # Ray sets OMP_NUM_THREADS to the number of processors of the task: a variable that the host lacks is removed.
    parent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    changed = None if b"\0OMP_NUM_THREADS=" in b"\0" + parent else os.environ.pop("OMP_NUM_THREADS", None)
    try:
        return Done(platform.node(), function(*arguments))
    except BumpgateError as error:
        return Lost(f"{platform.node()}: {one_line(error, 400)}", refused=True)
    finally:
        if changed is not None:
            os.environ["OMP_NUM_THREADS"] = changed


@contextmanager
def folder_on_host(kind: str, name: str) -> Iterator[Path]:
    """Yield a folder of this host for a name: a task that is repeated on the host continues in it.

    The folder is deleted when the block ends without an exception.
    """
    place = home() / "fleet" / kind / hashlib.sha256(name.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    yield place
    shutil.rmtree(place, ignore_errors=True)


def pack(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name, without caches: hosts share no file system."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and "caches" not in name.parts:
            with path.open("rb") as file:
                if path.suffix != ".json":
                    file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST))
                found[name.as_posix()] = file.read()
    return found


def unpack(files: Mapping[str, bytes], folder: Path, last: str) -> None:
    """Write files into a folder. The file `last` is written at the end: without it, the others do not count."""
    for name in sorted(files, key=lambda each: each == last):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, files[name])


@dataclass(frozen=True)
class Readings:
    """Takes the readings of one bisect on a cluster.

    most: how many to take at once. folder: the working directory, on every host. good: the version of the good
    endpoint, with which timed rows are paired.
    """

    cluster: Cluster
    options: Options
    most: int
    folder: Path
    good: str

    def number(self) -> int:
        slots = self.cluster.slots(self.options.lane)
        if not slots:
            raise MachineError(f"no host of the fleet offers {_resource(self.options.lane)}")
        return min(slots, self.most)

    def take(self, jobs: Sequence[tuple[Path, Request]]) -> Iterator[Reading]:
        calls = [(self.options, self.folder, str(p.absolute()), request, self.good) for p, request in jobs]
        tasks = [Task(read_on_host, call, self.options.lane) for call in calls]
        lost = []
        for number, result in self.cluster.run(tasks):
            place = jobs[number][0]
            place.mkdir(parents=True, exist_ok=True)
            if isinstance(result, Lost):
                if result.refused:
                    raise FleetError(result.why)
                lost.append(Reading(place, Cause.MACHINE, failure=result.why))
                continue
            unpack(result.value, place, READING)
            reading = load(place)
            assert reading is not None, f"{place} has no reading"
            reading = replace(reading, host=result.host)
            keep(reading)
            yield reading
        # Without a host, no candidate is at fault, and none is skipped.
        if lost and not self.cluster.slots(self.options.lane):
            raise MachineError(lost[0].failure)
        for reading in lost:
            keep(reading)
            yield reading


def read_on_host(options: Options, folder: Path, name: str, request: Request, good: str) -> dict[str, bytes]:
    """Take one reading on this host and return its files. name: names the folder of the reading here."""
    os.chdir(folder)
    setup = options.setup(options.root(), good, say=lambda line: None)
    with folder_on_host("probes", name) as place:
        take(place, request, setup.build, setup.test)
        return pack(place)


def measure_on_host(lane: str, arguments: tuple[str, ...], folder: Path, name: str) -> dict[str, bytes]:
    """Run a gate on this host and return its files. A task that is repeated here continues the gate.

    name: names the folder of the gate here. Raises BumpgateError on bad input, OSError if the gate was cut short.
    """
    with folder_on_host("gates", name) as out:
        resume = ["--resume"] if (out / NAME).exists() else []
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        options = ["--lane", lane, *arguments[:cut], "--out", str(out), *resume, *arguments[cut:]]
        log = out / LOG
        code, _ = run_child([sys.executable, "-c", MAIN, "gate", *options], folder, os.environ, None, log)
        if code == BAD_INPUT:
            raise BumpgateError(last_line(log).removeprefix("bumpgate: "))
        found = read_gate(out)
        if found is None or found.decision.value != code:  # Python ends with 1, too, if it fails
            raise OSError(f"the gate ended with {code}: {last_line(log)}")
        return pack(out)


def read_gate(folder: Path) -> GateFile | None:
    """Return the finished gate in a folder, or None. Raises GateFileError if its evidence gives another verdict."""
    found = read_judged(folder / NAME) if (folder / NAME).exists() else None
    return found if isinstance(found, GateFile) and found.finished else None


@dataclass
class Fleet:
    """The cluster of one command, to which it connects at the first use, and the most probes of a bisect at once."""

    address: str
    most: int

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.address)

    def close(self) -> None:
        if "cluster" in vars(self):
            self.cluster.close()


@app.callback()
def fleet(
    context: typer.Context,
    ray: Annotated[str, typer.Option(help="HOST:PORT of the head of the cluster.")],
    probes: Annotated[int, typer.Option(help="The most probes of a bisect at once.", min=1)] = 16,
) -> None:
    """Run gates and bisects on the hosts of a Ray cluster.

    A host offers the custom resource lane_NAME for each lane that it can run. Every host has the source tree at the
    same path.
    """
    context.obj = Fleet(ray, probes)
    context.call_on_close(context.obj.close)


@app.command("bisect", help=bisect_command.command.__doc__)
@takes(Options)
def bisect(context: typer.Context, options: Options) -> None:
    if options.environments:
        raise BisectError("--environments is for one host: bumpgate bisect --environments, without fleet")
    cluster, most, folder = context.obj.cluster, context.obj.most, Path.cwd()
    words = ("fleet", "--ray", context.obj.address, "--probes", str(most))
    raise typer.Exit(
        bisect_command.run(
            options, lambda resolved, good: Readings(cluster, resolved, most, folder, good), words
        )
    )


@app.command()
def gate(
    context: typer.Context,
    lane: Annotated[list[str], typer.Option(help="A lane, measured on one host; repeatable.")],
    arguments: Annotated[list[str], typer.Argument(help="After --: options of bumpgate gate.")],
    out: Annotated[Path, typer.Option(help="A folder per lane with gate.json.")] = Path("build/fleet"),
) -> None:
    """Gate several lanes at once, each on a host that offers it. A lane whose hosts die is repeated on another one.

    Exit codes: 0 all ADOPT, 1 a HOLD, 125 a lane without a verdict, 4 bad input.
    """
    lanes = [*dict.fromkeys(lane)]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if named := next((word for word in own if word.partition("=")[0] in ("--lane", "--out")), ""):
        raise FleetError(f"{named} after --: the fleet sets it for each gate; name it before --")
    if known := [name for name in lanes if read_gate(out / name)]:
        raise FleetError(f"{out} holds gates of {', '.join(known)}: leave these out, or name another --out")
    calls = [(name, (*arguments,), Path.cwd(), f"{os.path.abspath(out)} {name}") for name in lanes]
    codes = set()
    for number, result in context.obj.cluster.run([Task(measure_on_host, call, call[0]) for call in calls]):
        name = lanes[number]
        if isinstance(result, Lost):
            typer.echo(f"{Decision.UNKNOWN.name:8} {name}: no verdict: {result.why}")
            codes.add(BAD_INPUT if result.refused else Decision.UNKNOWN.value)
            continue
        unpack(result.value, out / name, NAME)
        try:
            found = read_gate(out / name)
        except BumpgateError as error:
            typer.echo(f"{Decision.UNKNOWN.name:8} {name}: no verdict: {error}")
            codes.add(Decision.UNKNOWN.value)
            continue
        assert found is not None, f"{out / name} has no finished gate"
        typer.echo(
            f"{found.decision.name:8} {name} on {result.host}: {len(found.findings)} findings;"
            f" {found.wall_seconds / 60:.1f} min; {out / name / NAME}"
        )
        codes.add(found.decision.value)
    raise typer.Exit(next((code for code in (BAD_INPUT, 1, 125) if code in codes), 0))
