"""Share one GPU's memory among the processes of a run.

A process that needs tens of GiB claims them and waits until they are free. Processes without a claim share the rest:
the contexts of a dozen workers and their small tests.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path

from bumpgate.process.gpu_shares import first_gpu
from bumpgate.process.locks import POLL_SECONDS, lock_file, locked, try_lock

LOCKS = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.gpu_memory"
SLOT_GIB = 2
UNCLAIMED_GIB = 30  # fourteen workers used 27 to 29 while nothing was claimed
LARGEST = 0.85  # of a card: what a claim that was measured on a larger one waits for
LONGEST_WAIT = 300  # seconds for processes without a claim to release what they hold
_slots_held: list[int] = []  # by this process: one number, or none


@contextmanager
def claimed(gib: float, *, first: bool = False) -> Iterator[None]:
    """Hold `gib` of the first GPU's memory, or all that may be claimed if that is less.

    A small claim may overtake a large one, because a run's claims come to an end; but none overtakes a claim with
    `first`. What torch has cached of it is released at exit.
    InfraError: other processes hold so much that the claim does not fit, and go on doing so.
    """
    import torch

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    with held(ceil(gib / SLOT_GIB), slots=max(1, int((total - UNCLAIMED_GIB) / SLOT_GIB)), first=first):
        try:
            wait_for_free(min(gib, LARGEST * total), lambda: torch.cuda.mem_get_info(0)[0] / 2**30)
            yield
        finally:
            torch.cuda.empty_cache()


def wait_for_free(gib: float, free: Callable[[], float], seconds: float = LONGEST_WAIT) -> None:
    """Wait until a GPU has as many GiB free. InfraError: it has not after so many seconds."""
    end = time.monotonic() + seconds
    while (found := free()) < gib:
        if time.monotonic() > end:
            from bumpgate.plugin.rows import InfraError

            raise InfraError(
                f"{found:.1f} GiB of the GPU's memory are free, and this test needs {gib:.0f}: end what uses the GPU"
            )
        time.sleep(POLL_SECONDS)


@contextmanager
def held(count: int, slots: int, *, first: bool = False) -> Iterator[None]:
    """Hold `count` of the slots, all if there are fewer. They are file locks: a process that dies frees its own.

    first: no other process gets one until this one has them.
    RuntimeError: this process holds some already. It would wait for itself if both do not fit.
    """
    if _slots_held:
        raise RuntimeError(
            f"this process already holds {_slots_held[0]} of {slots} slots: claim once, the sum"
        )
    count = min(count, slots)
    while True:
        with locked(_lock("turn"), exclusive=True):
            found = _taken(count, slots)
            while first and found is None:
                time.sleep(POLL_SECONDS)
                found = _taken(count, slots)
        if found is not None:
            break
        time.sleep(POLL_SECONDS)
    with found:
        _slots_held.append(count)
        try:
            yield
        finally:
            _slots_held.clear()


def _lock(name: object) -> Path:
    return Path(f"{LOCKS}-{first_gpu()}.{name}")


def _taken(count: int, slots: int) -> ExitStack | None:
    """Take `count` free slots until the stack is closed; None, with none held, if there are not enough."""
    with ExitStack() as stack:
        for i in range(slots):
            slot = stack.enter_context(lock_file(_lock(i)))
            count -= try_lock(slot)
            if not count:
                return stack.pop_all()
    return None
