"""`bumpgate fleet`: gates and bisects on the hosts of a Ray cluster.

Ray places, queues and transports; nothing here schedules. A host offers the custom resource `lane_NAME` for each lane
that it can run. A command runs on one host, alone: the processes of both sides of a pair are never on two hosts.
"""

from __future__ import annotations

import hashlib
import json
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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.bisect.command import JSON
from bumpgate.core.errors import BumpgateError, need, one_line
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import write_atomic
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
LOG, BAD_INPUT, UNKNOWN = "fleet.log", 4, Decision.UNKNOWN.value
MAIN = "from bumpgate.cli import main; main()"
# The file that a command writes at its end. Without it, the others do not count.
RESULT = {"gate": NAME, "bisect": JSON}

app = typer.Typer(no_args_is_help=True)


class FleetError(BumpgateError):
    """A cluster that cannot be reached, or a call that no host can run. One line."""


@dataclass(frozen=True)
class Task:
    """A call on one host that offers the lane. It is pickled, and may run more than once."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    lane: str


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


def run_tasks(
    address: str, tasks: Sequence[Task], patience: float = PATIENCE
) -> Iterator[tuple[int, Done | Lost]]:
    """Yield the number of each task with its result, as they end; those left are cancelled with the iterator.

    Ray's client ends its process when the head of the cluster is lost, so it runs in a separate process.
    address: `HOST:PORT` of the head. Raises FleetError if there is no cluster.
    """
    need("ray", command="--ray", extra="fleet")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_client, args=(theirs, address, tasks, patience), daemon=True)
    process.start()
    theirs.close()
    left = set(range(len(tasks)))
    try:
        why = "its head does not answer"
        with suppress(EOFError, OSError):
            why = pipe.recv()
        if why:
            raise FleetError(f"--ray {address}: no cluster there ({why})")
        with suppress(EOFError, OSError):
            while left:
                number, found = pipe.recv()
                left.remove(number)
                yield number, found
        for number in left:
            yield number, Lost("the head of the cluster is lost")
    finally:
        process.kill()  # the tasks that still run end with it


def _client(pipe: Connection, address: str, tasks: Sequence[Task], patience: float) -> None:
    """Connect, send why there is no cluster, "" if there is one, then the results. Runs in a separate process."""
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
    for found in _run(ray, tasks, patience):
        pipe.send(found)


def _resource(lane: str) -> str:
    return f"lane_{re.sub(r'[^A-Za-z0-9]', '_', lane)}"


def _run(ray: Any, tasks: Sequence[Task], patience: float) -> Iterator[tuple[int, Done | Lost]]:
    """Run tasks on a cluster. A task that no host can take for `patience` seconds is lost."""
    remote = ray.remote(on_worker)
    pending = {}
    for number, task in enumerate(tasks):
        needs = {_resource(task.lane): SHARE}
        options = {"num_cpus": 1, "resources": needs, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        pending[remote.options(**options).remote(task.function, task.arguments)] = number
    waiting: dict[str, float] = {}  # resource -> since when no host offers it
    while pending:
        ended, _ = ray.wait([*pending], timeout=POLL_SECONDS)
        for ref in ended:
            yield pending.pop(ref), _result(ray, ref)
        for ref, number in [] if ended else [*pending.items()]:
            resource = _resource(tasks[number].lane)
            if any(node["Alive"] and resource in node["Resources"] for node in ray.nodes()):
                waiting.pop(resource, None)
            elif time.monotonic() - waiting.setdefault(resource, time.monotonic()) >= patience:
                ray.cancel(ref, force=True)
                del pending[ref]
                yield number, Lost(f"no host is left for {resource}")


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


def run_on_host(
    command: str, lane: str, arguments: tuple[str, ...], folder: Path, name: str
) -> dict[str, bytes]:
    """Run `bumpgate COMMAND` on this host and return its files. A task that is repeated here continues it.

    name: names the folder of the results on this host.
    Raises BumpgateError on bad input, OSError if the command was cut short; the folder is then kept.
    """
    key = hashlib.sha256(repr((name, lane, arguments)).encode()).hexdigest()[:16]
    out = home() / "fleet" / command / key
    out.mkdir(parents=True, exist_ok=True)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    # A bisect of a gate's finding, or of a command, is told no lane.
    own = {word.partition("=")[0] for word in arguments[:cut]} & {"--from-gate", "--command"}
    options = [
        *([] if command == "bisect" and own else ["--lane", lane]),
        *arguments[:cut],
        "--out",
        str(out),
    ]
    # A bisect without a state starts; a gate is resumed from its gate.json.
    options += ["--resume"] if command == "bisect" or (out / NAME).exists() else []
    options += arguments[cut:]
    log = out / LOG
    code, _ = run_child([sys.executable, "-c", MAIN, command, *options], folder, os.environ, None, log)
    if code == BAD_INPUT:
        raise BumpgateError(last_line(log).removeprefix("bumpgate: "))
    found = read_result(command, out)
    if found is None or found[0] != code:  # Python ends with 1, too, if it fails
        raise OSError(f"the {command} ended with {code}: {last_line(log)}")
    files = pack(out)
    shutil.rmtree(out, ignore_errors=True)
    return files


def read_result(command: str, folder: Path) -> tuple[int, str] | None:
    """Return the exit code of a finished gate or bisect in a folder, and its answer in a line; None without one."""
    path = folder / RESULT[command]
    if not path.exists():
        return None
    if command == "gate":
        gate = read_judged(path)
        if not isinstance(gate, GateFile) or not gate.finished:
            return None
        return gate.decision.value, f"{len(gate.findings)} findings; {gate.wall_seconds / 60:.1f} min"
    raw = json.loads(path.read_text(encoding="utf-8"))
    answer = (
        f"first bad {raw['package']} {' or '.join(raw['suspects'])}" if raw["suspects"] else raw["failure"]
    )
    return 0 if raw["sure"] else UNKNOWN, answer


Lanes = Annotated[list[str], typer.Option("--lane", help="A lane, on one host that offers it; repeatable.")]
Out = Annotated[Path, typer.Option(help="A folder per lane with the results.")]


@app.callback()
def fleet(
    context: typer.Context, ray: Annotated[str, typer.Option(help="HOST:PORT of the head of the cluster.")]
) -> None:
    """Run gates and bisects on the hosts of a Ray cluster.

    A host offers the custom resource lane_NAME for each lane that it can run. Every host has the source tree at the
    same path.
    """
    context.obj = ray


@app.command()
def gate(
    context: typer.Context,
    lane: Lanes,
    arguments: Annotated[list[str], typer.Argument(help="After --: options of bumpgate gate.")],
    out: Out = Path("build/fleet"),
) -> None:
    """Gate several lanes at once, each on a host that offers it. A lane whose hosts die is repeated on another one.

    Exit codes: 0 all ADOPT, 1 a HOLD, 125 a lane without a verdict, 4 bad input.
    """
    raise typer.Exit(_run_lanes("gate", context.obj, lane, arguments, out))


@app.command()
def bisect(
    context: typer.Context,
    lane: Lanes,
    arguments: Annotated[list[str], typer.Argument(help="After --: options of bumpgate bisect.")],
    out: Out = Path("build/fleet"),
) -> None:
    """Bisect on several lanes at once, each on a host that offers it. A host that died is replaced by another one.

    Exit codes: 0 all found, 125 a lane without a sure answer, 4 bad input or endpoints without the claimed result.
    """
    raise typer.Exit(_run_lanes("bisect", context.obj, lane, arguments, out))


def _run_lanes(command: str, address: str, named: list[str], arguments: list[str], out: Path) -> int:
    """Run a command for each lane, print a line for each, and return the exit code of the worst."""
    lanes = [*dict.fromkeys(named)]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if wrong := next((w for w in own if w.partition("=")[0] in ("--lane", "--out", "--resume")), ""):
        raise FleetError(f"{wrong} after --: the fleet sets it for each {command}; leave it out there")
    if known := [name for name in lanes if read_result(command, out / name)]:
        raise FleetError(
            f"{out} holds {command}s of {', '.join(known)}: leave these out, or name another --out"
        )
    calls = [(command, name, (*arguments,), Path.cwd(), os.path.abspath(out)) for name in lanes]
    codes = set()
    for number, result in run_tasks(address, [Task(run_on_host, call, call[1]) for call in calls]):
        name = lanes[number]
        if isinstance(result, Lost):
            typer.echo(f"{Decision.UNKNOWN.name:8} {name}: no result: {result.why}")
            codes.add(BAD_INPUT if result.refused else UNKNOWN)
            continue
        unpack(result.value, out / name, RESULT[command])
        try:
            found = read_result(command, out / name)
        except BumpgateError as error:
            typer.echo(f"{Decision.UNKNOWN.name:8} {name}: no result: {error}")
            codes.add(UNKNOWN)
            continue
        assert found is not None, f"{out / name} has no result"
        code, answer = found
        verdict = "FOUND" if command == "bisect" and code == 0 else Decision(code).name
        typer.echo(f"{verdict:8} {name} on {result.host}: {answer}; {out / name / RESULT[command]}")
        codes.add(code)
    return next((code for code in (BAD_INPUT, 1, UNKNOWN) if code in codes), 0)
