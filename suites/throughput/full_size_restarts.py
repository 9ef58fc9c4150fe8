"""The cold and warm processes of the full-size restart check: how many are started, and which of them is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.cache.layers import cold_layers

# Of warm over cold CPU seconds. A restart that finds no entry of AOTAutograd compiles most of its graphs again.
RATIO_TOLERANCE = 0.2
RESTARTS = 2

Process = dict[str, Any]


def restarts(start: Callable[[], Process]) -> dict[str, Any]:
    """Return the cold process, and "warm": those after it, the cheapest first."""
    cold, *warm = (start() for _ in range(1 + RESTARTS))
    return {"cold": cold, "warm": sorted(warm, key=cpu_seconds)}


def coldest(cold: Process, warm: list[Process]) -> Process:
    """Return the warm process that took least from the caches: an intermittently lost layer counts as lost."""
    return max(warm, key=lambda process: (len(cold_layers(cold, process)), process["autotunes"]))


def cpu_seconds(process: Process) -> float:
    """Return the CPU seconds of step 0: the ops' own kernels, then the graphs, with the compile workers."""
    return process["cpu_seconds"]


def ratio(cold: Process, warm: list[Process]) -> float:
    """Return the CPU seconds of the cheapest warm step 0 over those of the cold one."""
    return min(map(cpu_seconds, warm)) / cpu_seconds(cold)
