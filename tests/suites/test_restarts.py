"""Number of warm processes started by the full-size restart check, and which of them it reports."""

from __future__ import annotations

import pytest

from suites.throughput.full_size_restarts import (
    LARGEST_RATIO,
    MOST_RESTARTS,
    coldest,
    ratio,
    restarts,
    seconds,
)

COLD = 60.0
WARM = {"aot_hit": 4, "aot_miss": 0, "aot_bypass": 0, "fx_hit": 8, "fx_miss": 0, "fx_bypass": 0}


@pytest.mark.parametrize(
    ("warm", "begun"),
    [
        pytest.param([5.0, 5.5], 2, id="quick"),
        pytest.param([9.0, 5.0], 2, id="one on a busy machine"),
        pytest.param([9.0, 8.0, 5.0], 3, id="two on a busy machine"),
        pytest.param([30.0, 31.0, 29.0, 30.5], MOST_RESTARTS, id="a layer lost"),
    ],
)
def test_ratio_uses_the_fastest_warm_restart(warm: list[float], begun: int) -> None:
    """If every warm start is slow, none of the repeats makes the ratio pass."""
    times = iter([COLD, *warm])
    result = restarts(lambda: {"kernels_seconds": 1.0, "seconds": next(times) - 1.0})
    assert [seconds(process) for process in result["warm"]] == sorted(warm)
    assert len(result["warm"]) == begun
    assert (ratio(result["cold"], result["warm"]) <= LARGEST_RATIO) == (min(warm) <= COLD * LARGEST_RATIO)


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param({"counts": {**WARM, "aot_hit": 3, "aot_miss": 1}}, id="a graph of AOTAutograd's"),
        pytest.param({"code": {"a.cubin": 2}}, id="a kernel"),
        pytest.param({"autotunes": 9}, id="a search"),
    ],
)
def test_coldest_reports_a_cache_layer_lost_in_one_process(lost: dict[str, object]) -> None:
    """The process that lost the layer was neither the first nor the slowest."""
    usual = {"counts": WARM, "code": {"a.cubin": 1}, "autotunes": 8}
    assert coldest(usual, [usual, usual | lost, usual]) == usual | lost
