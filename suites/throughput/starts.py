"""Starts of the model in fresh processes, for suites/throughput/test_cold_start.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bumpgate.plugin.duet import Duet, partner, shared_cores
from bumpgate.plugin.rows import InfraError
from bumpgate.plugin.timing import Watch
from suites.support.child import run_json
from suites.support.environment import compiler
from suites.support.lanes import Lane

LONGEST = 300.0
ATTEMPTS = 2


def starts(lane: Lane, folder: Path) -> list[dict[str, Any]]:
    """Return the results of two fresh processes on one cache that starts empty: cold, then warm.

    In a paired session the other side's start at the same time, and both start again if other processes used the
    machine meanwhile. Raises InfraError if they did so every time.
    """
    duet = partner()
    for attempt in range(ATTEMPTS):
        watch = Watch()
        found = [started(lane, folder / str(attempt), duet) for _ in range(2)]
        if duet is None or watch.was_quiet(duet):
            return found
    raise InfraError(f"other processes used this machine during {ATTEMPTS} starts")


def started(lane: Lane, caches: Path, duet: Duet | None) -> dict[str, Any]:
    """Start one process on these caches; in a paired session, when the other side is ready too."""
    if duet:
        duet.agree("start", "what they start")
    environment = {
        **compiler(),
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        # Compile in the process itself: a phase counts only what its own compilers use.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    with shared_cores():
        return run_json("suites.throughput.cold_start", lane.device, environment=environment, timeout=LONGEST)
