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
    shared = {"unit": "count", "rule": "C18", "evidence": evidence, "instruments": ("cache",)}
    row(
        f"{CASE}/aot_hits",
        after["aot_hit"],
        witness=before["aot_miss"] or 0,
        expected=before["aot_miss"],
        **shared,
    )
    row(
        f"{CASE}/fx_hits",
        after["fx_hit"],
        witness=before["fx_miss"] or 0,
        expected=before["fx_miss"],
        **shared,
    )
    for metric, key in (("aot_misses", "aot_miss"), ("fx_misses", "fx_miss")):
        row(f"{CASE}/{metric}", after[key] or 0, witness=after["aot_hit"] or 0, expected=0, **shared)
    for metric, key in (("aot_bypasses", "aot_bypass"), ("fx_bypasses", "fx_bypass")):
        row(f"{CASE}/{metric}", after[key] or 0, witness=after["aot_hit"] or 0, expected=0, **shared)
    row(
        f"{CASE}/new_shared_objects",
        len(new_code(cold, warm)),
        unit="files",
        witness=len(cold["code"]),
        rule="C18",
        expected=0,
    )
    row(
        f"{CASE}/autotune_benchmarks",
        warm["autotunes"],
        unit="count",
        witness=warm["graphs"],
        rule="C18",
        expected=0,
        instruments=("autotune",),
    )


@lanes("cpu")
def test_warm_restart_is_cheap_and_bit_equal(lane: Lane, restarts, row) -> None:
    cold, warm = restarts
    seconds = (
        f"cold {cold['cpu_seconds']:.1f} CPU s, {cold['wall_seconds']:.1f} s wall",
        f"warm {warm['cpu_seconds']:.1f} CPU s, {warm['wall_seconds']:.1f} s wall",
    )
    row(
        f"{CASE}/cpu_seconds_ratio",
        warm["cpu_seconds"] / cold["cpu_seconds"],
        unit="ratio",
        witness=cold["graphs"],
        rule="C18",
        at_most=0.5,
        evidence=seconds,
    )
    apart = largest_difference(warm["losses"], cold["losses"])
    row(f"{CASE}/loss_difference", apart, unit="nats", witness=len(cold["losses"]), rule="C18", expected=0.0)
