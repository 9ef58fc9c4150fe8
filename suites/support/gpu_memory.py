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
UNCLAIMED_GIB = 36


@contextmanager
def claimed(gib: float) -> Iterator[None]:
    """Holds this much of the first GPU's memory, or all that may be claimed where that is less.

    Waits in turn: a large claim is not overtaken by small ones. What torch keeps of it is given back at the end.
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
    with ExitStack() as stack:
        with locked(Path(f"{LOCKS}.turn"), exclusive=True):
            free = [stack.enter_context(lock_file(Path(f"{LOCKS}.{i}"))) for i in range(slots)]
            wanted = min(count, slots)
            while wanted:
                for slot in [*free]:
                    if wanted and taken(slot):
                        free.remove(slot)
                        wanted -= 1
                if wanted:
                    time.sleep(POLL_SECONDS)
        yield
