"""Throughput without a GPU: statistics of samples, warm restarts, and the rows over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from bumpgate.core.baseline import load
from model import preset
from suites.distributed import scaling
from suites.support import gpu_timing
from suites.support.child import ROOT
from suites.support.lanes import LANES
from suites.throughput.full_size import one_of_each_kind
from suites.throughput.full_size_restarts import (
    coldest,
    cpu_seconds,
    ratio,
    restarts,
)


def test_median_interval_of_few_and_many_samples() -> None:
    """The 99 % interval of a median by the binomial distribution."""
    assert gpu_timing.median([8, 1, 7, 2, 6, 3, 5, 4])[:3] == (4.5, 1, 8)
    assert gpu_timing.median(range(20))[:3] == (9.5, 4, 16)


def test_compared_calls_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "_timed", lambda function: function())
    clock = iter(range(100))
    functions = [lambda: next(clock), lambda: next(clock)]
    assert gpu_timing.alternately(functions, calls=3, warmup=2) == [[4, 6, 8], [5, 7, 9]]


@pytest.mark.parametrize("name", ["nam12", "nam52", "nam56r"])
def test_short_stack_has_each_kind_of_layer_once(name: str) -> None:
    config = preset(name, "full")
    short = one_of_each_kind(config)
    assert [*short.kinds] == [*dict.fromkeys(config.kinds)]
    assert (short.d_model, short.experts, short.vocab_size) == (
        config.d_model,
        config.experts,
        config.vocab_size,
    )


WARM = {"aot_hit": 4, "aot_miss": 0, "aot_bypass": 0, "fx_hit": 8, "fx_miss": 0, "fx_bypass": 0}


def test_ratio_is_of_cpu_seconds_of_the_cheapest_warm_restart() -> None:
    starts = iter([100.0, 20.0, 9.0])
    result = restarts(lambda: {"cpu_seconds": next(starts)})
    assert [cpu_seconds(process) for process in result["warm"]] == [9.0, 20.0]
    assert ratio(result["cold"], result["warm"]) == pytest.approx(0.09)


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


BOUNDS = {"peak_memory": "", "compile_seconds": "compiler", "compile_skew": "compiler"}
ALONE = {"step": 1.0, "step_without_exchange": 1.0, "tokens": 100, "peak": 8.0, "compile": 4.0, "timed": 5}
RANKS = [{**ALONE, "step": 1.25, "compile": 5.0}, {**ALONE, "step": 1.0, "peak": 9.0}]
FOUND = {1: {"regional": [ALONE], "per_block": [{**ALONE, "step": 1.5}]}}
LINKS = "calibration/exchange/all_reduce_bytes_per_second"
FOUND[2] = {
    "regional": RANKS,
    "per_block": [{**ALONE, "step": 2.5}, ALONE],
    "calibrate": [{LINKS: 3e11, "calibration/launch/launch_microseconds": us} for us in (4.0, 5.0)],
}


def measured(monkeypatch: pytest.MonkeyPatch, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the test of `world` ranks -> its rows, and what it did not run."""
    monkeypatch.setattr(scaling, "run", lambda ranks, caches: FOUND[min(ranks, 2)])
    rows: dict[str, Any] = {}
    host: dict[str, Any] = {}
    left_out: dict[str, Any] = {}

    class Rows:
        def cost(self, id: str, value: object, unit: str, *, bound: str, **_: object) -> None:
            rows[id.rpartition("/")[2]] = value
            assert bound == BOUNDS.get(id.rpartition("/")[2], f"exchange-{world}, launch-{world}")

        def calibration(self, id: str, value: object, unit: str, **_: object) -> None:
            host[id] = value

        def not_run(self, ids: Iterable[str], reason: str, *, excused: bool) -> None:
            left_out.update(ids=list(ids), reason=reason, excused=excused)

    scaling.report(world, Rows())
    slowest = {
        f"exchange-{world}/all_reduce_bytes_per_second": 3e11,
        f"launch-{world}/launch_microseconds": 5.0,
    }
    assert host == ({f"calibration/{name}": value for name, value in slowest.items()} if rows else {})
    return rows, left_out


@pytest.mark.parametrize("world", scaling.WORLDS)
def test_rows_of_ranks_are_of_the_slowest(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """The slowest rank counts: an efficiency of 1 / 1.25, an exchange of a fifth of a step."""
    rows, left_out = measured(monkeypatch, world)
    assert left_out == {}
    assert rows == pytest.approx(
        {
            "tokens_per_second_per_rank": 80.0,
            "efficiency": 0.8,
            "exposed_communication": 0.2,
            "peak_memory": 9.0,
            "compile_seconds": 5.0,
            "compile_skew": 1.0,
            "break_tax": 1.0,
            "break_tax_alone": 0.5,
        }
    )


def test_negative_break_tax_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H200s with slow links: breaks cost time, and the step without them waits longer for its exchange."""
    slow = [{**ALONE, "step": 0.834, "step_without_exchange": 0.654}]
    found = {**FOUND[2], "regional": slow, "per_block": [{**ALONE, "step": 0.681}]}
    monkeypatch.setitem(FOUND, 2, found)
    rows, left_out = measured(monkeypatch, 2)
    assert "break_tax" not in rows
    assert "break_tax_alone" in rows
    assert left_out["ids"] == ["throughput/nam52-full-ddp-2_gpus/break_tax"]
    assert "exposed communication of 0.22" in left_out["reason"]


def test_failing_rank_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [ALONE, {"error": "ContractError: rank 1: no GPU 1, 1 are here"}]
    monkeypatch.setattr(scaling, "run_cases", lambda cases, *_: dict.fromkeys(cases, ranks))
    with pytest.raises(RuntimeError, match=r"^2 ranks: ContractError: rank 1: no GPU 1"):
        scaling.run(2, "")


def test_lane_h200x2_requires_two_gpus_and_judges_throughput() -> None:
    """Its heirs of more GPUs have its set, and no times before one was measured."""
    lane = LANES["h200x2"]
    assert (lane.device, lane.gpu, lane.count) == ("cuda", "H200", 2)
    heirs = {name: (heir.gpu, heir.count) for name, heir in LANES.items() if heir.inherits == lane.name}
    assert heirs == {f"{gpu.lower()}x{n}": (gpu, n) for gpu in ("H100", "H200") for n in (4, 8)}
    reviewed = load(ROOT / "baselines" / "h200x2.json", "h200x2")
    assert reviewed.made_with["device"] == "NVIDIA H200"
    assert {row.rpartition("/")[2] for row in reviewed.rows if row.startswith("throughput/")} == set(
        scaling.REVIEWED
    )
