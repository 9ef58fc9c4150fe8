"""Fixtures of every lane test of this repository, in addition to the plugin's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from bumpgate.plugin import lane_of
from bumpgate.plugin.rows import MACHINE_STATE, baseline_path, lane_baseline, report_canaries
from suites.support.lanes import LANES
from suites.support.planted import planted_faults as planted_faults
from suites.support.scheduling import turn


@pytest.hookimpl(trylast=True)  # after pytest's own, which sorts by the parameters of session fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run canaries first: an instrument is checked before anything is measured with it.

    On a GPU, long tests come before them, and tests that need the machine to themselves come last: in between, one
    would wait for all others to end, and they for it. By then the compiled code of the others is on disk.
    """
    items.sort(key=lambda item: (*_turn_on_gpu(item), "canaries" not in item.path.parts))


def _turn_on_gpu(item: pytest.Item) -> tuple[int, int]:
    lane = lane_of(item)
    if lane is None or LANES[lane].device != "cuda":
        return 0, 0
    alone = "exclusive_machine" in getattr(item, "fixturenames", ())
    return turn(item.nodeid, alone)


@pytest.fixture
def canaries() -> Callable[..., None]:
    """Check the named instruments in this process, once; a row that names an unchecked one is INSTRUMENT."""
    from suites.support.canaries import prove

    return lambda *names: report_canaries(prove(names))


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest, exclusive_machine: None) -> Iterator[None]:
    """The plugin's fixture; on an H200, additionally, no other process may use the GPU.

    There each timed row carries the GPU's state, and is INFRA if that state invalidates times.
    """
    if lane_of(request.node) != "h200":
        yield
        return
    from suites.support.gpu_state import alone_on_gpu

    with alone_on_gpu() as state:
        request.node.stash[MACHINE_STATE] = lambda: [state(), *_anchors(request.config)]
        yield


def _anchors(config: pytest.Config) -> list[str]:
    """Return this run's ceilings next to the reviewed ones, if a test of this process has measured any."""
    gpu_timing = sys.modules.get("suites.support.gpu_timing")
    reviewed = lane_baseline(baseline_path(config, "h200"), "h200").rows
    return gpu_timing.compare_with_reviewed(reviewed) if gpu_timing else []
