"""Starts child processes, limits their time, ends their process groups, and describes in one line how they ended.

A child leads a session of its own: ctrl-C at a terminal reaches only this process, and every process that the child
has started is killed with it. A child that may outlive a killed bumpgate runs under supervise.py.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from bumpgate.core.errors import BumpgateError, one_line, text_lines
from bumpgate.process import supervise
from bumpgate.process.host import cores, read_or_empty

SIGNALLED = supervise.SIGNALLED
# Signals that a program causes itself. Any other one was sent to it, and counts as the machine's.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
# How long pytest may take to write its record after ctrl-C or a timeout, before it is killed.
GRACE_SECONDS = 20
POLL_SECONDS = 0.1
# Cores per child that imports torch and compiles: with fewer, children slow down each other and other processes.
CORES_A_CHILD = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


class ChildFault(BumpgateError):  # noqa: N818 - a fault of the child, not of the caller
    """A child crashed, hung or gave no result. The message is one line: "killed by SIGSEGV", its last error line."""


def start(
    command: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.STDOUT,
    supervised: bool = False,
    keep_open: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a new session. `end_group` ends it. Raises OSError.

    supervised: the group is also killed when this process dies.
    keep_open: descriptors that the command inherits.
    """
    guard = [sys.executable, "-I", "-S", supervise.__file__] if supervised else []
    return subprocess.Popen(
        [*guard, *command],
        cwd=cwd,
        env=None if environment is None else dict(environment),
        stdin=subprocess.PIPE if supervised else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=tuple(keep_open),
    )


def signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to every process of a child's group that is left."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a child's process group, and wait for the child."""
    signal_group(child, signal.SIGKILL)
    child.wait()
    if child.stdin:
        child.stdin.close()


@dataclass(frozen=True)
class Ending:
    """How a process ended. signal: its name, "" without one. limit: seconds after which it was stopped, if it was."""

    signal: str = ""
    limit: float | None = None

    @property
    def crash(self) -> bool:
        return self.signal in CRASHES

    def __str__(self) -> str:
        """Describe an end that is not an exit: `died of SIGSEGV`, `no end within 60 s`; "" for an exit."""
        if self.limit is not None:
            return f"no end within {self.limit:.0f} s"
        return f"died of {self.signal}" if self.signal else ""


def ending(code: int | None, seconds: float = 0.0, timeout: float | None = None) -> Ending:
    """Return how a process ended.

    code: its exit code, or minus the signal's number; None if it never ran.
    seconds, timeout: how long it ran, and its time limit.
    """
    if timeout is not None and seconds >= timeout:
        return Ending(limit=timeout)
    return Ending(_signal_name(-code) if code is not None and code < 0 else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(code: int, stderr: str) -> str:
    """Describe how a process ended, in one line: signal name or exit code, then the last line of stderr."""
    end = f"killed by {_signal_name(-code)}" if code < 0 else f"exit {code}"
    lines = text_lines(stderr)
    # Under faulthandler the last line is a list of loaded extensions; the first line has the error.
    last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
    return f"{end}: {one_line(last, 200)}" if last else end


def last_line(log: Path) -> str:
    """Return the last line with text of a child's output."""
    lines = text_lines(read_or_empty(log)) or ["it printed nothing"]
    return one_line(lines[-1], 120)


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float) -> str:
    """Return the standard output of a command that exits with 0 within `timeout` seconds.

    Output goes to files: a grandchild that holds a pipe open would keep the caller waiting for it.
    Raises ChildFault (one line).
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = start(command, cwd, environment, stdout=out, stderr=err)
        except OSError as error:
            raise ChildFault(f"{command[0]}: {error.strerror}") from None
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildFault(f"no answer in {timeout:.0f} s") from None
        finally:
            end_group(child)
        out.seek(0)
        err.seek(0)
        if code:
            raise ChildFault(describe_end(code, err.read().decode(errors="replace")))
        return out.read().decode(errors="replace")


@dataclass(frozen=True)
class Interpreter:
    """Another Python, run in child processes: its crash, hang or invalid output only loses the result.

    python: the executable.
    root: the source tree, every child's working directory.
    environment: every child's environment variables.
    """

    python: Path
    root: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, *arguments: str, timeout: float, extra: Mapping[str, str] = {}) -> str:
        """Return the standard output of `python *arguments`. Raises ChildFault.

        timeout: seconds, after which the child and its own children are killed.
        extra: environment variables to add.
        """
        return run([str(self.python), *arguments], self.root, {**self.environment, **extra}, timeout)

    def prove(self, *arguments: str, did: Sequence[str], timeout: float) -> None:
        """Run a program that prints `token(*did)` at its end. Raises ChildFault, also if it did not print it.

        Exit code 0 alone proves nothing: any module that the program imports can end the process.
        """
        if token(*did) not in self.run(*arguments, timeout=timeout).splitlines():
            raise ChildFault("ended with exit code 0 before it had done its work")

    def json(self, *arguments: str, timeout: float, extra: Mapping[str, str] = {}) -> Any:
        """Parse the last line that the child prints as JSON. Raises ChildFault."""
        printed = self.run(*arguments, timeout=timeout, extra=extra).strip().splitlines()
        try:
            return json.loads(printed[-1])
        except (IndexError, json.JSONDecodeError):
            last = f": {one_line(printed[-1], 80)}" if printed else ""
            raise ChildFault(f"printed no result{last}") from None


def token(*did: str) -> str:
    """Return the line that a child prints once it has done everything: a digest of what that was."""
    import hashlib

    return hashlib.sha256("\n".join(did).encode()).hexdigest()


# For programs that run where bumpgate is not installed.
TOKEN = inspect.getsource(token)


def require_syntax(command: str) -> None:
    """Raise BumpgateError (one line) if /bin/sh cannot parse a command line of the option --command."""
    done = subprocess.run(["/bin/sh", "-n", "-c", command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BumpgateError(f"--command {command!r}: {one_line(done.stderr)}")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Map `function`, which waits for a child, over `items` in threads; results in order. Raises the first error."""
    with ThreadPoolExecutor(max(1, (cores() or 1) // CORES_A_CHILD)) as pool:
        return list(pool.map(function, items))


@dataclass(frozen=True)
class LoggedChild:
    """A command and the path of its output. keep_open: descriptors that it inherits, and no other child does."""

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    log: Path
    keep_open: tuple[int, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        own = self.command, self.cwd, self.environment
        try:
            with self.log.open("wb") as output:
                return start(*own, stdout=output, supervised=True, keep_open=self.keep_open)
        finally:
            for descriptor in self.keep_open:
                os.close(descriptor)  # so that the holder of the other end sees EOF when this child ends


def run_child(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float | None, log: Path
) -> tuple[int, float]:
    """Return the exit code (minus the signal number, if any) and the wall seconds; the output is in `log`.

    The command and its children end with this call, and with this process. Raises KeyboardInterrupt after that.
    """
    return run_children([LoggedChild(command, cwd, environment, log)], timeout)[0]


def run_children(children: Sequence[LoggedChild], timeout: float | None) -> list[tuple[int, float]]:
    """Run several children at once. What is left of a child's group is killed when the child ends."""
    started = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    ended: dict[int, tuple[int, float]] = {}
    try:
        for child in children:
            running.append(child.start())
        processes = tuple(running)
        while running:
            left = None if timeout is None else started + timeout - time.monotonic()
            for process in tuple(running):
                code = _interrupt(process) if left is not None and left <= 0 else process.poll()
                if code is not None:
                    ended[process.pid] = code, time.monotonic() - started
                    running.remove(process)
                    end_group(process)
            # One process is waited for, several are polled.
            with suppress(subprocess.TimeoutExpired):
                if running:
                    running[0].wait(left if len(running) == 1 else POLL_SECONDS)
    except KeyboardInterrupt:
        for process in running:
            _interrupt(process)
        raise
    finally:
        for process in running:
            end_group(process)
    codes = [ended[process.pid] for process in processes]
    return [(SIGNALLED - code if code > SIGNALLED else code, seconds) for code, seconds in codes]


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Send ctrl-C, on which pytest writes its record. Return the exit code, minus SIGKILL if it had to be killed."""
    signal_group(process, signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    return -signal.SIGINT
