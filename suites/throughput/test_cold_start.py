"""The cost of a start: importing torch, compiling a step on an empty cache by phase, and starting on the filled cache.

Rules C13, C18. A machine's seconds are not reviewed: a lane run records them, and paired sessions of the gate compare
them with the adopted build's, two processes at once.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from suites.support.lanes import Lane, lanes
from suites.throughput.starts import starts

pytestmark = pytest.mark.cold


@lanes("cpu", "h200")
def test_cold_and_warm_start(lane: Lane, row, tmp_path: Path, exclusive_machine) -> None:
    cold, warm = starts(lane, tmp_path)
    case = f"throughput/start-{lane.name}"
    shared = {"better": "lower", "paired": True, "witness": cold["graphs"]}
    seconds = shared | {"unit": "s"}
    for phase, spent in cold["phases"].items():
        row(f"{case}/cold_{phase}_cpu_seconds", spent, rule="C13", **seconds)
    row(f"{case}/cold_cpu_seconds", cold["cpu_seconds"], rule="C13", **seconds)
    row(f"{case}/cold_wall_seconds", cold["wall_seconds"], rule="C13", **seconds)
    row(f"{case}/warm_cpu_seconds", warm["cpu_seconds"], rule="C18", **seconds)
    imports = [process["import_cpu_seconds"] for process in (cold, warm)]
    row(f"{case}/import_cpu_seconds", statistics.mean(imports), rule="C13", **seconds)
    row(f"{case}/cold_peak_rss_bytes", cold["peak_rss_bytes"], unit="bytes", rule="C13", **shared)
    row(f"{case}/warm_peak_rss_bytes", warm["peak_rss_bytes"], unit="bytes", rule="C18", **shared)
    assert cold["losses"] == warm["losses"], "the graphs of the cache compute another loss"
