"""Helpers for tests of a search: fake nightlies, noisy probes, a search driver."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

# Runs of a simulation.
RUNS = 1000
# A simulation's claim holds if it would pass by chance less often than this.
SIGNIFICANCE = 1e-3


def tail(count: int, trials: int, p: float) -> float:
    """Probability of at least `count` of `trials`."""
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))


def labels(n: int) -> list[str]:
    return [f"2.14.0.dev{day:04}" for day in range(n)]


def drive(searched: Any, read: Callable[[int], str], limit: int = 400) -> Any:
    """Run a search to its end, one probe at a time."""
    outcome = type(searched.old)
    for _ in range(limit):
        due = searched.next()
        if not due:
            return searched.result()
        index = due[0]
        searched.record(index, outcome[read(index)])
    raise AssertionError(f"no end after {limit} probes")


def noisy(first_bad: int, false_bad: float, false_good: float, dice: random.Random) -> Callable[[int], str]:
    def read(index: int) -> str:
        if index >= first_bad:
            return "GOOD" if dice.random() < false_good else "BAD"
        return "BAD" if dice.random() < false_bad else "GOOD"

    return read
