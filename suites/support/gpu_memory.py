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

from suites.support.timing import POLL_SECONDS, lock_file, locked, taken

LOCKS = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.gpu_memory"
SLOT_GIB = 2
UNCLAIMED_GIB = 35


@contextmanager
def claimed(gib: float) -> Iterator[None]:
    """Holds this much of the first GPU's memory, or all that may be claimed where that is less.

    A small claim may overtake a large one: a run's claims come to an end. What torch keeps of it is given back.
    """
    import torch

    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    with held(ceil(gib / SLOT_GIB), slots=max(1, int((total - UNCLAIMED_GIB) / SLOT_GIB))):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


@contextmanager
def held(count: int, slots: int) -> Iterator[None]:
    """Holds `count` of the slots, all where there are fewer. They are locks: a process that dies has freed its own."""
    while True:
        with ExitStack() as stack:
            if _took(min(count, slots), slots, stack):
                yield
                return
        time.sleep(POLL_SECONDS)


def _took(count: int, slots: int, stack: ExitStack) -> bool:
    """Takes so many free slots, until the stack is closed; False where there are not enough, and none is to be kept."""
    with locked(Path(f"{LOCKS}.turn"), exclusive=True):
        for i in range(slots):
            slot = stack.enter_context(lock_file(Path(f"{LOCKS}.{i}")))
            count -= taken(slot)
            if not count:
                return True
    return False
