"""Timed rows that can be believed on a busy machine: CPU time, interleaved with an anchor, as log-ratio medians.

Wall medians wander by a third on a loaded box; the ratio of CPU times of two workloads that alternate in one
process wanders by 2-3 %. What is left is a bias of the process, which only more processes remove.
pytest-benchmark times one function after the other and switches itself off under xdist, so it does not fit.
"""

from __future__ import annotations

import fcntl
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOCK = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.machine"


@contextmanager
def machine(*, exclusive: bool) -> Iterator[None]:
    """Holds the machine: timed rows exclusively, everything else shared.

    Two locks: an exclusive waiter keeps the gate, so that a stream of shared holders cannot starve it.
    """
    with open(f"{LOCK}.gate", "w") as gate, open(f"{LOCK}.lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        if not exclusive:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def anchor() -> None:
    """A fixed workload that no torch can change: NumPy arithmetic and interpreter work, about 30 CPU ms."""
    a = np.linspace(0.0, 1.0, 1 << 14, dtype=np.float32)
    total = 0
    for _ in range(60):
        a = np.tanh(a + 0.1) * 0.9
        for i in range(4000):
            total += i & 7


@dataclass(frozen=True)
class Ratio:
    """A median ratio with its 99 % confidence interval from order statistics."""

    median: float
    low: float
    high: float
    pairs: int


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """CPU seconds of each function in each round; the order turns by one place a round."""
    names = list(functions)
    for _ in range(warmup):
        for name in names:
            functions[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.process_time()
            functions[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> Ratio:
    """The median of the paired ratios, with the order statistics that enclose it at 99 %."""
    logs = sorted(math.log(a / b) for a, b in zip(numerator, denominator))
    n = len(logs)
    reach = min(n // 2, math.ceil(2.576 * math.sqrt(n) / 2))
    low, high = logs[max(0, n // 2 - reach)], logs[min(n - 1, n // 2 + reach)]
    return Ratio(math.exp(statistics.median(logs)), math.exp(low), math.exp(high), n)
