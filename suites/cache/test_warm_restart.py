"""A fresh process on a warm cache directory compiles nothing, checked layer by layer.

Rules C17, C18. The hit counters alone are wrong on CPU in three cases (another CPU capability, deleted shared objects,
a loaded artifact bundle: each reads hit/hit while every C++ file is compiled again), so new shared objects and CPU
seconds have their own rows.
"""

from __future__ import annotations

import pytest

from suites.cache.layers import new_code
from suites.support.child import run_json
from suites.support.environment import compiler
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest_difference

pytestmark = [pytest.mark.cold, pytest.mark.long(75)]

CASE = "cache/nam12-regional-restart"


@pytest.fixture(scope="module")
def restarts(tmp_path_factory) -> tuple[dict, dict]:
    """The same program in two fresh processes, on one cache directory that starts empty."""
    environment = {
        **compiler(),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    cold, warm = (
        run_json("suites.cache.restart", "nam12", "regional", environment=environment, timeout=500)
        for _ in range(2)
    )
    return cold, warm


@lanes("cpu")
def test_warm_restart_hits_every_cache_layer(lane: Lane, restarts, row, canaries) -> None:
    canaries("cache", "autotune")
    cold, warm = restarts
    before, after = cold["counts"], warm["counts"]
    evidence = (f"cold {before}", f"warm {after}")
    # Absent counters read None, and count as 0 misses only with a positive count of hits: the witness.
    for metric, key, expected, seen in (
        ("aot_hits", "aot_hit", before["aot_miss"], before["aot_miss"]),
        ("fx_hits", "fx_hit", before["fx_miss"], before["fx_miss"]),
        ("aot_misses", "aot_miss", 0, after["aot_hit"]),
        ("fx_misses", "fx_miss", 0, after["aot_hit"]),
        ("aot_bypasses", "aot_bypass", 0, after["aot_hit"]),
        ("fx_bypasses", "fx_bypass", 0, after["aot_hit"]),
    ):
        value = after[key] if metric.endswith("hits") else after[key] or 0
        row.count(f"{CASE}/{metric}", value, expected=expected, rule="C18", seen=seen or 0, evidence=evidence)
    row.count(
        f"{CASE}/new_shared_objects",
        len(new_code(cold, warm)),
        unit="files",
        expected=0,
        rule="C18",
        seen=cold["code"],
    )
    row.count(f"{CASE}/autotune_benchmarks", warm["autotunes"], expected=0, rule="C18", seen=warm["graphs"])


@lanes("cpu")
def test_warm_restart_is_cheap_and_bit_equal(lane: Lane, restarts, row) -> None:
    cold, warm = restarts
    seconds = (
        f"cold {cold['cpu_seconds']:.1f} CPU s, {cold['wall_seconds']:.1f} s wall",
        f"warm {warm['cpu_seconds']:.1f} CPU s, {warm['wall_seconds']:.1f} s wall",
    )
    row.bound(
        f"{CASE}/cpu_seconds_ratio",
        warm["cpu_seconds"] / cold["cpu_seconds"],
        "ratio",
        at_most=0.5,
        rule="C18",
        seen=cold["graphs"],
        evidence=seconds,
    )
    apart = largest_difference(warm["losses"], cold["losses"])
    row.bound(f"{CASE}/loss_difference", apart, "nats", expected=0.0, rule="C18", seen=cold["losses"])
