"""Locks between processes: a fair lock that is shared or exclusive, and the lock of a device.

All of them are `flock` locks, which a killed process releases.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from bumpgate.core.lanes import Lane
from bumpgate.process.gpu_shares import lock_names, used_gpus

POLL_SECONDS = 0.1


@contextmanager
def locked(what: Path, *, exclusive: bool, patient: bool = False) -> Iterator[None]:
    """Hold a lock on `what`, which is any path and need not exist.

    Two locks: a waiter for the exclusive lock holds the entry lock (.gate), so that a stream of shared holders cannot
    starve it. A patient waiter lets new shared holders in; use it where they are known to end.
    """
    with lock_file(Path(f"{what}.gate")) as gate, lock_file(Path(f"{what}.lock")) as lock:
        if exclusive and patient:
            while not try_lock(lock):
                time.sleep(POLL_SECONDS)
            yield
            return
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        if not exclusive:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def lock_file(path: Path) -> TextIO:
    """Open for reading, which suffices to lock it: a sticky directory allows no more with another user's file."""
    if not path.exists():
        path.touch()
        path.chmod(0o644)
    return path.open()


def try_lock(file: TextIO) -> bool:
    """Try to lock the file without blocking; return whether this process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def device_lock(lane: Lane, say: Callable[[str], None], gpus: Sequence[str] = ()) -> Iterator[None]:
    """Hold the lock of a lane's device: concurrent timed runs would disturb each other's times.

    say: prints a line if another process holds the lock.
    gpus: the GPUs of a lane on GPUs, by default all that it may use.
    """
    names = [{"xla": "tpu"}.get(lane.device, lane.device)]
    if lane.device == "cuda":
        names = [f"cuda-{gpu}" for gpu in lock_names(gpus or used_gpus(lane.count))]
    with ExitStack() as stack:
        for device in names:
            name = re.sub(r"[^A-Za-z0-9.+-]+", "-", device).strip("-")
            path = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.gate-{name}"
            lock = stack.enter_context(path.open("a+"))
            if not try_lock(lock):
                lock.seek(0)
                say(f"device {device} is in use by process {lock.read().strip() or '?'}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield
