"""Waits until the cores of a run are mostly idle, for a measurement that should not count other tests' work."""

from __future__ import annotations

import time

import psutil

from bumpgate.process.gpu_shares import own_cores

IDLE = 25.0  # percent of the cores' time
WINDOW = 2.0  # seconds


def wait_for_idle_cores(timeout: float) -> bool:
    """Wait until this process's cores were at most IDLE percent busy for WINDOW seconds; False after `timeout` seconds.

    Exclusive tests of the same GPU wait meanwhile, and the others need no more than the time that they take anyway.
    """
    cores, end = own_cores(), time.monotonic() + timeout
    while time.monotonic() < end:
        used = psutil.cpu_percent(WINDOW, percpu=True)
        if sum(used[core] for core in cores) <= IDLE * len(cores):
            return True
    return False
