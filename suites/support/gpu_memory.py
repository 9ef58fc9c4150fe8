"""The memory of one GPU, shared out among a run's processes.

Who needs tens of GiB claims them and waits until they are free. What claims nothing has the rest: the contexts of a
dozen workers and their small tests.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path

from bumpgate.plugin.timing import POLL_SECONDS, lock_file, locked, taken

LOCKS = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.gpu_memory"
SLOT_GIB = 2
UNCLAIMED_GIB = 30  # fourteen workers had 27 to 29 in use while nobody claimed any


@contextmanager
def claimed(gib: float, *, first: bool = False) -> Iterator[None]:
    """Holds this much of the first GPU's memory, or all that may be claimed where that is less.

    A small claim may overtake a large one, for a run's claims come to an end; but none overtakes one that is to come
    first. What torch keeps of it is given back.
    """
    import torch

    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    with held(ceil(gib / SLOT_GIB), slots=max(1, int((total - UNCLAIMED_GIB) / SLOT_GIB)), first=first):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


@contextmanager
def held(count: int, slots: int, *, first: bool = False) -> Iterator[None]:
    """Holds `count` of the slots, all where there are fewer. They are locks: a process that dies has freed its own.

    first: nobody else is given one until it has them.
    """
    count = min(count, slots)
    while True:
        with locked(Path(f"{LOCKS}.turn"), exclusive=True):
            found = _taken(count, slots)
            while first and found is None:
                time.sleep(POLL_SECONDS)
                found = _taken(count, slots)
        if found is not None:
            break
        time.sleep(POLL_SECONDS)
    with found:
        yield


def _taken(count: int, slots: int) -> ExitStack | None:
    """So many free slots, until the stack is closed; None where there are not enough, and none is kept."""
    with ExitStack() as stack:
        for i in range(slots):
            slot = stack.enter_context(lock_file(Path(f"{LOCKS}.{i}")))
            count -= taken(slot)
            if not count:
                return stack.pop_all()
    return None
