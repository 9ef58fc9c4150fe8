"""The cold and warm processes of the full-size restart check: how many are started, and which of them is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.cache.layers import cold_layers

LARGEST_RATIO = 0.1
# Parallel work only increases the time of a process, so the fastest counts: of two, of more while all are too slow.
RESTARTS, MOST_RESTARTS = 2, 4

Process = dict[str, Any]


def restarts(start: Callable[[], Process]) -> dict[str, Any]:
    """Return the cold process, and "warm": those after it, the fastest first."""
    cold, *warm = (start() for _ in range(1 + RESTARTS))
    while ratio(cold, warm) > LARGEST_RATIO and len(warm) < MOST_RESTARTS:
        warm.append(start())
    return {"cold": cold, "warm": sorted(warm, key=seconds)}


def coldest(cold: Process, warm: list[Process]) -> Process:
    """Return the warm process that took least from the caches: an intermittently lost layer counts as lost."""
    return max(warm, key=lambda process: (len(cold_layers(cold, process)), process["autotunes"]))


def seconds(process: Process) -> float:
    """Return the seconds of step 0: the ops' own kernels, then the graphs."""
    return process["kernels_seconds"] + process["seconds"]


def ratio(cold: Process, warm: list[Process]) -> float:
    """Return the ratio of the fastest warm step 0 to the cold one."""
    return min(map(seconds, warm)) / seconds(cold)
