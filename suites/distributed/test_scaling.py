"""Throughput over ranks: NCCL on 2, 4 and 8 GPUs, as many as there are; and that the measurement sees a slow exchange.

Rules C14, C18.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from bumpgate.plugin.rows import EXCUSED_PROPERTY, NOT_RUN_PROPERTY
from suites.distributed import scaling
from suites.distributed.ranks import run_cases
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

# The full size of the H200 lane's throughput rows, for each rank.
WORK = {"name": "nam52", "size": "full", "rows": 2, "tokens": 4096, "steps": 10}
UNITS = dict(
    zip(scaling.METRICS, ("tokens/s", "ratio", "ratio", "MiB", "s", "s", "ratio", "ratio"), strict=True)
)


@lanes("h200x2")
@pytest.mark.parametrize("world", scaling.WORLDS)
def test_throughput_scales_over_gpus(
    lane: Lane, world: int, exclusive_machine: None, record_property: Callable[[str, object], None], row
) -> None:
    ids = {name: f"throughput/nam52-full-ddp-{world}_gpus/{name}" for name in scaling.METRICS}
    if reason := scaling.missing_gpus(world, torch.cuda.device_count()):
        record_property(NOT_RUN_PROPERTY, json.dumps([f"{id}: {reason}" for id in ids.values()]))
        record_property(EXCUSED_PROPERTY, "1")
        pytest.skip(f"not run: {reason}")
    alone, several = (scaling.run("cuda", ranks, WORK) for ranks in (1, world))
    values = scaling.summary(alone, several)
    for name, id in ids.items():
        row(
            id,
            values[name],
            unit=UNITS[name],
            witness=sum(one["timed"] for one in several["regional"]),
            rule="C18" if name.startswith("compile") else "C14",
            better="higher" if name in ("tokens_per_second_per_rank", "efficiency") else "lower",
            tolerance=0.1,
            paired=True,
            work=f"{WORK}",
            evidence=[f"rank {rank}: {one}" for rank, one in enumerate(several["regional"])],
        )


@lanes("cpu")
@planted("C14", "an exchange of gradients that takes 300 ms longer")
def test_exposed_exchange_is_measured(lane: Lane, row) -> None:
    small = {"name": "nam12", "size": "narrow", "pattern": "A", "rows": 1, "tokens": 16, "steps": 2}
    case = {"program": "measure", "policy": "eager", **small}
    found = run_cases({"usual": case, "slow": {**case, "delay": 0.3}}, lane.device)
    assert not any("error" in one for ranks in found.values() for one in ranks), found
    exposed = {
        name: [one["step"] - one["step_without_exchange"] for one in ranks] for name, ranks in found.items()
    }
    row(
        "distributed/scaling/ranks_with_an_exposed_exchange",
        sum(seconds > 0.2 for seconds in exposed["slow"]),
        unit="count",
        witness=sum(one["timed"] for one in found["slow"]),
        rule="C14",
        expected=2,
        evidence=[f"{name}: {seconds} s" for name, seconds in exposed.items()],
    )
    assert max(exposed["usual"]) < 0.2
    assert all(one["peak"] > 0 and one["compile"] == 0 for one in found["usual"])
