"""Runs a program in two environments, and says whether it separates them: right in one, wrong in the other."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bumpgate.core.errors import BumpgateError, one_line, text_lines
from bumpgate.process import child
from bumpgate.process.host import read_or_empty
from bumpgate.process.runner import child_environment

TRY_SECONDS = 120.0
NEITHER = 125
TIMED_OUT = -9
# Inductor believes the CPU's list of vector instructions: its own check imports torch anew for each of them.
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# A server that has imported torch and compiled once, and runs each program in a fork: both take longer than most
# programs. Where there is a GPU it does not compile: CUDA does not survive a fork.
SERVER = r"""
import json, os, runpy, signal, sys, traceback
try:
    import torch, torch._dynamo
    if not os.path.exists("/dev/nvidiactl"):
        torch.compile(lambda x: x + 1)(torch.zeros(1))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
except Exception:
    pass  # the program itself then says why torch does not import
def program(path, log):
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for n in (1, 2):
        os.dup2(out, n)
    code = 0
    try:
        sys.argv[:] = [path]
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(code & 255)
print("ready", flush=True)
for line in sys.stdin:
    path, log, seconds = json.loads(line)
    pid = os.fork()
    if not pid:
        os.setsid()
        signal.alarm(int(seconds))
        program(path, log)
    status = os.waitpid(pid, 0)[1]
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """code: exit code, or minus the signal's number. text: what the program printed."""

    code: int
    text: str

    @property
    def last(self) -> str:
        """What the program found: its last line with text."""
        return one_line((text_lines(self.text) or [""])[-1], 200)


@dataclass
class Environment:
    """One side: its name in messages, its Python, and the versions in it."""

    name: str
    python: Path
    versions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{n} {v}" for n, v in self.versions.items()) or self.name


class Bench:
    """Both environments, and a folder for programs, logs and compile caches.

    It is a context manager: the servers end with it.
    """

    def __init__(self, good: Environment, bad: Environment, folder: Path) -> None:
        self.good, self.bad, self.folder = good, bad, folder.absolute()
        self.runs = 0
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Bench:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._server, (self.good, self.bad)))
        except BumpgateError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.kill()
            server.wait()

    def swapped(self) -> None:
        self.good, self.bad = self.bad, self.good

    def run(self, side: Environment, text: str, seconds: float = TRY_SECONDS) -> Outcome:
        """Run a program in a fork of an environment's server. Raises BumpgateError if it cannot be started."""
        program, log = self.folder / f"try-{side.name}.py", self.folder / f"try-{side.name}.log"
        program.write_text(text, encoding="utf-8")
        server = self._server(side)
        assert server.stdin
        assert server.stdout
        self.runs += 1
        try:
            server.stdin.write(json.dumps([str(program), str(log), seconds]) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        except (OSError, ValueError):
            self._servers.pop(side.name).kill()
            raise BumpgateError(
                f"{side.python}: its process ended while a program ran; start again"
            ) from None
        return Outcome(code, read_or_empty(log))

    def fresh(self, side: Environment, text: str, seconds: float = TRY_SECONDS) -> Outcome:
        """Run a program in a process of its own, with empty compile caches."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            place = Path(name)
            (place / "program.py").write_text(text, encoding="utf-8")
            command = [str(side.python), "program.py"]
            self.runs += 1
            code, _ = child.run_child(command, place, self._variables(side, place), seconds, place / "log")
            return Outcome(code, read_or_empty(place / "log"))

    def _variables(self, side: Environment, caches: Path) -> dict[str, str]:
        caches = caches.absolute()
        found = child_environment(side.python, None)
        found |= {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        return SETTINGS | found | {"PYTHONSAFEPATH": "1"}

    def _server(self, side: Environment) -> subprocess.Popen[str]:
        server = self._servers.get(side.name)
        if server and server.poll() is None:
            return server
        try:
            server = subprocess.Popen(
                [str(side.python), "-c", SERVER],
                cwd=self.folder,
                env=self._variables(side, self.folder / f"caches-{side.name}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise BumpgateError(
                f"{side.python}: {error.strerror}; name another interpreter with --{side.name} PYTHON"
            ) from None
        assert server.stdout
        if server.stdout.readline() != "ready\n":
            server.wait()
            raise BumpgateError(
                f"{side.python} does not run; name another interpreter with --{side.name} PYTHON"
            )
        self._servers[side.name] = server
        return server


@dataclass(frozen=True)
class Proof:
    """The runs of a finished program in fresh processes. fault: what contradicts it in one line, "" if nothing."""

    good: tuple[Outcome, ...]
    bad: tuple[Outcome, ...]
    fault: str = ""


def prove(bench: Bench, text: str, times: int) -> Proof:
    """Run a program `times` times on both sides at once. A run that ends otherwise than expected is the fault."""
    runs: dict[str, list[Outcome]] = {"good": [], "bad": []}
    for turn in range(times):
        with ThreadPoolExecutor(2) as pool:
            pair = pool.map(lambda side: bench.fresh(side, text), (bench.good, bench.bad))
        for kind, side, expected, found in zip(runs, (bench.good, bench.bad), (0, 1), pair, strict=True):
            runs[kind].append(found)
            if found.code != expected:
                fault = f"run {turn + 1} of {times} under {side} ended with {found.code}, expected {expected}"
                return Proof(tuple(runs["good"]), tuple(runs["bad"]), f"{fault}: {found.last}")
    return Proof(tuple(runs["good"]), tuple(runs["bad"]))


VERSIONS = """
import importlib.metadata as m, json
print(json.dumps({n: m.version(n) for n in ("torch", "triton") if any(m.distributions(name=n))}))
"""


def environment(name: str, python: Path) -> Environment:
    """Ask an interpreter for its versions. Raises BumpgateError if it does not run."""
    path = Path(os.path.abspath(python))
    if not path.exists():
        fix = f"build it again, or name an interpreter with --{name} PYTHON"
        raise BumpgateError(f"{path}: the {name} environment is gone; {fix}")
    reader = child.Interpreter(path, path.parent, child_environment(path, None))
    with suppress(child.ChildFault):
        return Environment(name, path, reader.json("-c", VERSIONS, timeout=60))
    raise BumpgateError(f"{path} does not run; name another interpreter with --{name} PYTHON")
