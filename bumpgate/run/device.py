"""Lock of a device: concurrent timed runs would disturb each other's times."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def device_lock(kind: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a lane's device. The lock of a killed process is released.

    kind: device of a lane ("cpu", "cuda", "xla"). say: prints a line if another process holds the lock.
    """
    device = {"cuda": f"cuda-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}", "xla": "tpu"}.get(kind, kind)
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
