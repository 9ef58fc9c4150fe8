"""Lock of a device: concurrent timed runs would disturb each other's times."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bumpgate.core.lanes import Lane
from bumpgate.process.gpu_shares import lock_names, used_gpus


@contextmanager
def device_lock(lane: Lane, say: Callable[[str], None], gpus: Sequence[str] = ()) -> Iterator[None]:
    """Hold the lock of a lane's device. The lock of a killed process is released.

    say: prints a line if another process holds the lock. gpus: those of a lane on GPUs, by default all that it may use.
    """
    names = [{"xla": "tpu"}.get(lane.device, lane.device)]
    if lane.device == "cuda":
        names = [f"cuda-{gpu}" for gpu in lock_names(gpus or used_gpus(lane.count))]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_one_lock(name, say))
        yield


@contextmanager
def _one_lock(device: str, say: Callable[[str], None]) -> Iterator[None]:
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", device).strip("-")
    path = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.gate-{name}"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            say(f"device {device} is in use by process {lock.read().strip() or '?'}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
