"""Sharing of the machine: lane tests run next to each other, a timed test runs alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bumpgate.plugin.duet import partner
from bumpgate.plugin.lanes import chosen_lane, lane_of, lanes_of
from bumpgate.plugin.scheduling import alone
from bumpgate.process.gpu_shares import Place, keep_to_cores, take_place, untimed

# Name of the property with the seconds that a test waited for its share of the machine, before it began.
WAITED_PROPERTY = "bumpgate_waited"
PLACE = pytest.StashKey[Place | None]()


def pytest_configure(config: pytest.Config) -> None:
    """Take this run's cores before any thread pool is created for the complete machine, and this worker's GPUs."""
    partner()
    keep_to_cores()
    lane = lanes_of(config)[chosen_lane(config) or ""]
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    number = int(worker.removeprefix("gw")) if worker else None
    config.stash[PLACE] = take_place(number, lane.count) if lane.device == "cuda" else None


@pytest.fixture(autouse=True)
def machine_share(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the machine shared; exclusively for a test that requests `exclusive_machine` or `benchmark`.

    In a paired session, the leading side holds it for both. On a GPU such a test holds its GPU exclusively and the
    machine shared. All tests of a run that wait for a GPU are in one worker, which lets the others run first.
    """
    duet, lane = partner(), lane_of(request.node)
    if lane is None or (duet and not duet.leads):
        yield
        return
    from bumpgate.plugin.timing import machine

    patient = lanes_of(request.config)[lane].device == "cuda"
    exclusive = alone(request.node) and not untimed()
    began = time.monotonic()
    with machine(exclusive=exclusive, patient=patient, place=request.config.stash[PLACE]):
        request.node.user_properties.append((WAITED_PROPERTY, time.monotonic() - began))
        yield
