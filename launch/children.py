"""Child processes of a launcher: output is tagged and kept, the first failure stops the rest and is reported.

Standard library only, so that a child with failing imports is still reported. Run by its path, `python -I -S
children.py`, it is the guard of a launcher: it kills the process groups whose ids it reads, once its input ends.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

LINE = 1 << 12  # bytes; a longer line is split
KEPT = 200  # lines of each child
GRACE = 5.0  # seconds from the request to stop to the kill
POLL = 0.02
SETTLE = 2.0  # seconds in which a failure of another child can still be found to be the cause of the first
# How a rank ends that loses another one: by an exception, or aborted by C++ (a thread of gloo, NCCL's watchdog).
ABORTED, RAISED_CODE = -signal.SIGABRT, 1
# A warning of torch's C++, which may follow the program's last line: NCCL's at an exit without a destroyed group.
WARNED = re.compile(
    r"(\[rank\d+\]:)?(\[W\d{4} |nanobind: |- leaked |- \.\.\. skipped|See https://nanobind\.)"
)
# The last line of a Python traceback; the output of a C++ abort after it is less informative.
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Child:
    """name: the tag of its lines; bumpgate.logs parses "rank0" as a rank. environment: complete, or None to inherit."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None


class ChildError(RuntimeError):
    """A child failed or timed out. The message is one line with the child's last one; `tail` has more.

    code: its exit code, negative for a signal, None if it was stopped by the timeout.
    """

    def __init__(self, name: str, code: int | None, how: str, tail: Sequence[str]) -> None:
        self.name, self.code, self.tail = name, code, tuple(tail)
        super().__init__(f"{name}: {how}: {last_line(tail)}")


def last_line(tail: Sequence[str]) -> str:
    """Return the exception line of the last traceback, else the last line with text that is no warning of C++."""
    texts = [line.strip() for line in tail if line.strip()]
    raised = [line for line in texts if RAISED.match(line)]
    return (raised or [line for line in texts if not WARNED.match(line)] or texts or ["no output"])[-1]


def run(
    children: Sequence[Child],
    *,
    seconds: float,
    log: Path | None = None,
    cwd: Path | None = None,
    check: Callable[[], str] = str,
) -> dict[str, tuple[str, ...]]:
    """Run the children concurrently until all have ended -> {name: last lines, stdout and stderr together}.

    Every line is written to `log` at once, prefixed with its child's tag ("[rank0]: "). The first child that fails
    stops the others; of several that fail within SETTLE, one that did not just lose another (exit code 1, SIGABRT) is
    the cause. All processes that a child started are ended before this call returns, and when this process is killed.

    check: what is wrong with the children as a whole, "" for nothing.
    Raises ChildError.
    """
    with ExitStack() as stack:
        file = stack.enter_context(log.open("ab", buffering=0)) if log else None
        guard = stack.enter_context(_Guard())
        running = [stack.enter_context(_Running(child, file, cwd, guard)) for child in children]
        # On exit, before the first of them is waited for.
        stack.callback(lambda: [one.stop() for one in running])
        end = time.monotonic() + seconds
        while True:
            codes = {one: one.poll() for one in running}
            if any(codes.values()):
                raise _failure(running, codes)
            waiting = [one for one, code in codes.items() if code is None]
            if not waiting:
                return {one.name: tuple(one.read_to_end()) for one in running}
            wrong = f"not ended in {seconds:g} s" if time.monotonic() > end else check()
            if wrong:
                raise ChildError(waiting[0].name, None, wrong, list(waiting[0].tail))
            time.sleep(POLL)


def _failure(running: Sequence[_Running], codes: dict[_Running, int | None]) -> ChildError:
    """Return the error of the child that failed first, or of one that is its cause and ends after it."""
    failed = [one for one, code in codes.items() if code]
    end = time.monotonic() + SETTLE
    while all(map(_lost_another, failed)) and len(failed) < len(running) and time.monotonic() < end:
        time.sleep(POLL)
        failed += [one for one in running if one not in failed and one.poll()]
    cause = min(failed, key=lambda one: (_lost_another(one), one.poll() == RAISED_CODE))
    code = cause.poll() or 0
    how = f"exit {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return ChildError(cause.name, code, how, cause.read_to_end())


def _lost_another(one: _Running) -> bool:
    """Return whether a child ended in a way in which a rank ends that loses another one."""
    return one.poll() in (ABORTED, RAISED_CODE)


class _Guard:
    """A process that kills the groups of the children if this process is killed, and cannot do so itself."""

    def __enter__(self) -> _Guard:
        command = [sys.executable, "-I", "-S", __file__]
        # In a session of its own, so that a signal to this process's group does not end it first.
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ChildError("guard", None, "not started", [str(error)]) from None
        return self

    def add(self, group: int) -> None:
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), b"%d\n" % group)

    def __exit__(self, *_: object) -> None:
        """End it before its input closes: the groups have ended, and their ids may be in use again."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


class _Running:
    """A started child, with a thread that reads its output; on exit its whole process group is stopped."""

    def __init__(self, child: Child, log: IO[bytes] | None, cwd: Path | None, guard: _Guard) -> None:
        self.name, self.log, self.tail = child.name, log, deque[str](maxlen=KEPT)
        self.pieces, self.unlogged = 0, False  # pieces: of the last line
        self.kill_at = 0.0  # by the monotonic clock, once it is to stop
        given = os.environ if child.environment is None else child.environment
        try:
            self.process = subprocess.Popen(
                child.command,
                cwd=cwd,
                env={**given, "PYTHONUNBUFFERED": "1"},  # buffered lines are lost if the process dies
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(child.name, None, "not started", [str(error)]) from None
        guard.add(self.process.pid)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        stream = self.process.stdout
        tag, ended = f"[{self.name}]: ".encode(), True
        with stream:
            for piece in iter(partial(stream.readline, LINE), b""):
                self.pieces = 1 if ended else self.pieces + 1
                line, ended = piece.rstrip(b"\r\n"), piece.endswith(b"\n")
                for own in (tag, tag.rstrip()):  # torch itself tags a rank's tracebacks and log lines
                    line = line.removeprefix(own)
                self.tail.append(line.decode(errors="replace"))
                self._keep(tag + line + b"\n")

    def _keep(self, line: bytes) -> None:
        """Append a line to the log, unbuffered, so that it stays whole. An unwritable log is reported once."""
        try:
            if self.log:
                self.log.write(line)
        except OSError as error:
            # The pipe must be read on: the child would fail at its next line, or wait in it forever.
            if not self.unlogged:
                print(f"{self.name}: lines are lost: {self.log.name}: {error.strerror}", file=sys.stderr)
            self.unlogged = True

    def poll(self) -> int | None:
        """Return the exit code once the child has ended; also stop its leftover processes, which keep the pipe open."""
        if self.process.returncode is None:
            # Not reaped yet: until then neither its pid nor its process group id can be reused.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal(signal.SIGKILL)
            self.process.wait()
        return self.process.returncode

    def read_to_end(self) -> list[str]:
        """Return the last lines of a child that has ended; the last of all, often a summary, in one piece."""
        self.reader.join(GRACE)
        lines, pieces = list(self.tail), self.pieces
        return [*lines[:-pieces], "".join(lines[-pieces:])] if 1 < pieces <= KEPT else lines

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> _Running:
        return self

    def stop(self) -> None:
        """Request the end of the child's process group. On exit it is killed GRACE seconds after the first request."""
        if self.poll() is None and not self.kill_at:
            self._signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + GRACE

    def __exit__(self, *_: object) -> None:
        self.stop()
        while self.poll() is None and time.monotonic() < self.kill_at:
            time.sleep(POLL)
        if self.poll() is None:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self.reader.join(GRACE)


def same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two paths name one file or directory. Both are resolved: either may be a link."""
    return Path(one).resolve() == Path(other).resolve()


def places() -> dict[str, str]:
    """Return the venv and the checkout of this process. All venvs link to the same interpreter."""
    return {"environment": sys.prefix, "checkout": str(Path(__file__).parent.parent)}


def moved(child: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of a child's `places` that differs from ours: its results are not about this run."""
    for name, ours in places().items():
        if not same_place(child[name], ours):
            yield f"the child's {name} is {child[name]}, ours {ours}"


if __name__ == "__main__":
    # After the last line: the launcher has ended, however it ended.
    for group in [int(line) for line in sys.stdin]:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
