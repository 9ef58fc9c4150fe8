"""A fresh process on a warm cache directory compiles nothing, checked layer by layer.

Rules C17, C18. The hit counters also read hit/hit where every C++ file is compiled again (another CPU capability,
deleted shared objects), so new shared objects and CPU seconds have their own rows.
"""

from __future__ import annotations

from functools import partial

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
    count = partial(row.count, rule="C18", evidence=(f"cold {before}", f"warm {after}"))
    for layer in ("aot", "fx"):
        missed = before[f"{layer}_miss"]
        count(f"{CASE}/{layer}_hits", after[f"{layer}_hit"], expected=missed, seen=missed or 0)
        # Absent counters read None, and count as 0 only with a positive count of hits: the witness.
        for metric, key in (("misses", "miss"), ("bypasses", "bypass")):
            value, hits = after[f"{layer}_{key}"] or 0, after["aot_hit"] or 0
            count(f"{CASE}/{layer}_{metric}", value, expected=0, seen=hits)
    written = len(new_code(cold, warm))
    count(f"{CASE}/new_shared_objects", written, unit="files", expected=0, seen=cold["code"])
    count(f"{CASE}/autotune_benchmarks", warm["autotunes"], expected=0, seen=warm["graphs"])


@lanes("cpu")
def test_warm_restart_is_cheap_and_bit_equal(lane: Lane, restarts, row) -> None:
    cold, warm = restarts
    about = {"at_most": 0.5, "rule": "C18", "seen": cold["graphs"]}
    about["evidence"] = [
        f"{name} {one['cpu_seconds']:.1f} CPU s, {one['wall_seconds']:.1f} s wall"
        for name, one in (("cold", cold), ("warm", warm))
    ]
    ratio = warm["cpu_seconds"] / cold["cpu_seconds"]
    row.bound(f"{CASE}/cpu_seconds_ratio", ratio, "ratio", **about)
    apart = largest_difference(warm["losses"], cold["losses"])
    row.bound(f"{CASE}/loss_difference", apart, "nats", expected=0.0, rule="C18", seen=cold["losses"])
