"""The cost of a start: importing torch, compiling a step on an empty cache by phase, and starting on the filled cache.

Rules C18, C37. A machine's seconds are not reviewed: a lane run records them, and paired sessions of the gate compare
them with the adopted build's, two processes at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from suites.support.lanes import Lane, lanes
from suites.throughput.starts import cold_start, warm_start

pytestmark = pytest.mark.cold

# Relative difference of two losses whose kernels sum in another order: the resolution of bf16, 2^-8.
OTHER_ORDER = 2**-8


@lanes("cpu", "h200")
def test_cold_start(lane: Lane, row, exclusive_machine) -> None:
    cold = cold_start(lane)
    assert cold["compiled"], "the process on an empty cache compiled nothing"
    cost = partial(row.cost, rule="C37", seen=cold["graphs"], paired=True)
    case = f"throughput/start-{lane.name}/cold"
    for phase, spent in cold["phases"].items():
        cost(f"{case}_{phase}_cpu_seconds", spent, "s")
    for metric, unit in (("cpu_seconds", "s"), ("wall_seconds", "s"), ("peak_memory_bytes", "bytes")):
        cost(f"{case}_{metric}", cold[metric], unit)


@lanes("cpu", "h200")
def test_warm_start(lane: Lane, row, exclusive_machine) -> None:
    """A session of a gate that only looks for slow processes repeats this start, which is three times as short."""
    warm = warm_start(lane)
    assert not warm["compiled"], f"the process on a filled cache compiled {warm['compiled']} graphs again"
    _check_losses(warm, warm["cold"])
    cost = partial(row.cost, seen=warm["loaded"], paired=True)
    case = f"throughput/start-{lane.name}"
    cost(f"{case}/warm_cpu_seconds", warm["cpu_seconds"], "s", rule="C18")
    cost(f"{case}/warm_peak_memory_bytes", warm["peak_memory_bytes"], "bytes", rule="C18")
    cost(f"{case}/import_cpu_seconds", warm["import_cpu_seconds"], "s", rule="C37")


def _check_losses(warm: Mapping[str, Any], cold: Mapping[str, Any]) -> None:
    """Check that the cached graphs compute the cold start's losses, bit for bit unless the warm start searched again.

    torch 2.11 to 2.13 repeat a few searches of reductions (the row `reductions_searched_again`), the loss's own kernel
    among them. Another winner sums in another order.
    """
    same = warm["losses"] == cold["losses"]
    if warm["searches"] and not same:
        pairs = zip(warm["losses"], cold["losses"], strict=True)
        same = all(math.isclose(a, b, rel_tol=OTHER_ORDER) for a, b in pairs)
    assert same, (
        f"the graphs of the cache compute losses {warm['losses']}, cold {cold['losses']}; the cold start made "
        f"{cold['searches']} benchmarks, the warm one {warm['searches']}"
    )
