"""Child processes of a launcher: every line kept and tagged, the first failure stops the rest, its last line is told.

Standard library only, so that a child that cannot even import is seen from outside.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

LINE = 1 << 12  # bytes; a longer line is kept in pieces
KEPT = 200  # lines of each child
GRACE = 5.0  # seconds from the request to stop to the kill
POLL = 0.02
# The line that a Python traceback ends in; what a C++ abort prints behind it says less.
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Child:
    """name: the tag of its lines; "rank0" is read as a rank by launch.logs. environment: whole, None to inherit."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None


class ChildError(RuntimeError):
    """A child failed or did not end. The message is one line with the child's own last one; `tail` has more.

    code: its exit code, negative for a signal, None where it was stopped for the time.
    """

    def __init__(self, name: str, code: int | None, how: str, tail: Sequence[str]) -> None:
        self.name, self.code, self.tail = name, code, tuple(tail)
        super().__init__(f"{name}: {how}: {last_line(tail)}")


def last_line(tail: Sequence[str]) -> str:
    """What a reader wants first: the exception that the last traceback ends in, else the last line with text."""
    texts = [line.strip() for line in tail if line.strip()]
    raised = [line for line in texts if RAISED.match(line)]
    return (raised or texts or ["no output"])[-1]


def run(
    children: Sequence[Child], *, seconds: float, log: Path | None = None, cwd: Path | None = None
) -> dict[str, tuple[str, ...]]:
    """Runs the children side by side until all have ended -> name -> its last lines, stdout and stderr together.

    Every line goes to `log` as it comes, behind its child's tag ("[rank0]: "); of each child KEPT lines stay in memory.
    The first child that fails stops the others: its error must not wait for their timeouts. Nothing that a child
    started outlives this call. Raises ChildError.
    """
    with ExitStack() as stack:
        file = stack.enter_context(log.open("ab", buffering=0)) if log else None
        running = [stack.enter_context(_Running(child, file, cwd)) for child in children]
        end = time.monotonic() + seconds
        while True:
            codes = {one: one.poll() for one in running}
            failed = [one for one, code in codes.items() if code]
            if failed:
                code = codes[failed[0]]
                how = f"exit {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
                raise ChildError(failed[0].name, code, how, failed[0].read_to_end())
            waiting = [one for one, code in codes.items() if code is None]
            if not waiting:
                return {one.name: tuple(one.read_to_end()) for one in running}
            if time.monotonic() > end:
                raise ChildError(waiting[0].name, None, f"not ended in {seconds:g} s", list(waiting[0].tail))
            time.sleep(POLL)


class _Running:
    """One started child, its output read by a thread of its own; leaving stops it and what it started."""

    def __init__(self, child: Child, log: IO[bytes] | None, cwd: Path | None) -> None:
        self.name, self.log, self.tail = child.name, log, deque[str](maxlen=KEPT)
        given = os.environ if child.environment is None else child.environment
        try:
            self.process = subprocess.Popen(
                child.command,
                cwd=cwd,
                env={**given, "PYTHONUNBUFFERED": "1"},  # a line that waits in a buffer dies with its process
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(child.name, None, "not started", [str(error)]) from None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        stream = self.process.stdout
        tag = f"[{self.name}]: ".encode()
        with stream:
            for piece in iter(partial(stream.readline, LINE), b""):
                self.tail.append(piece.decode(errors="replace").rstrip("\r\n"))
                if self.log is not None:  # one unbuffered write to a file opened for appending: whole lines
                    self.log.write(tag + piece.rstrip(b"\r\n") + b"\n")

    def poll(self) -> int | None:
        """The exit code once the child has ended; what it has left behind, and holds its pipe open, ends here too."""
        if self.process.returncode is None:
            # Not reaped yet: until then nobody else can get its number, nor that of its group.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal(signal.SIGKILL)
            self.process.wait()
        return self.process.returncode

    def read_to_end(self) -> list[str]:
        """The last lines of a child that has ended."""
        self.reader.join(GRACE)
        return list(self.tail)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self._signal(signal.SIGTERM)
            end = time.monotonic() + GRACE
            while self.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
            if self.poll() is None:
                self._signal(signal.SIGKILL)
                self.process.wait()
        self.reader.join(GRACE)


def same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two paths name one file or directory. Both sides are resolved: either may come through a link."""
    return Path(one).resolve() == Path(other).resolve()


def places() -> dict[str, str]:
    """Where this process runs: its environment and its checkout, as it sees them.

    The environment is sys.prefix and not the interpreter, which every venv links from the same one.
    """
    return {"environment": sys.prefix, "checkout": str(Path(__file__).parent.parent)}


def moved(child: Mapping[str, str]) -> Iterator[str]:
    """Lines on each place of a child's `places` that is another than ours: what it found is not about this run."""
    for name, ours in places().items():
        if not same_place(child[name], ours):
            yield f"the child's {name} is {child[name]}, ours {ours}"
