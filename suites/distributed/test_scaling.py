"""Throughput over ranks: NCCL on 2, 4 and 8 GPUs of one host; and that the measurement sees a slow exchange.

Rules C14, C18.
"""

from __future__ import annotations

import pytest

from suites.distributed import scaling
from suites.distributed.ranks import run_cases, sound
from suites.support.lanes import LANES, Lane, lanes
from suites.support.planted import planted
from suites.support.reduce import largest


# It waits until no other test runs, and compiles nam52 twice from empty caches.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("lane", "world"),
    [
        pytest.param(lane, world, id=f"{world}-{lane.name}", marks=getattr(pytest.mark, lane.name))
        for lane in LANES.values()
        for world in scaling.WORLDS
        if world <= lane.count
    ],
    scope="session",
)
def test_throughput_scales_over_gpus(lane: Lane, world: int, exclusive_machine: None, row) -> None:
    scaling.report(world, row)


@lanes("cpu")
@planted("C14", "an exchange of gradients that takes 300 ms longer")
def test_exposed_exchange_is_measured(lane: Lane, row) -> None:
    small = {"name": "nam12", "size": "narrow", "pattern": "A", "rows": 1, "tokens": 16, "steps": 2}
    case = {"program": "measure", "policy": "eager", "work": small}
    found = run_cases({"usual": case, "slow": {**case, "delay": 0.3}}, lane.device)
    exposed = {
        name: [one["step"] - one["step_without_exchange"] for one in sound(found, name)] for name in found
    }
    about = {"expected": 2, "seen": sum(one["timed"] for one in found["slow"]), "rule": "C14"}
    about["evidence"] = [f"{name}: {seconds} s" for name, seconds in exposed.items()]
    slow = sum(seconds > 0.2 for seconds in exposed["slow"])
    row.count("distributed/scaling/ranks_with_an_exposed_exchange", slow, **about)
    assert largest(exposed["usual"]) < 0.2
    assert all(one["peak"] > 0 and one["compile"] == 0 for one in found["usual"])
