"""Fixtures of every lane test of this repository, in addition to the plugin's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from bumpgate.core.lanes import Lane
from bumpgate.plugin.lanes import lane_of, lanes_of
from bumpgate.plugin.rows import MACHINE_STATE
from bumpgate.plugin.scheduling import alone, turn
from bumpgate.process.gpu_shares import untimed
from suites.support.planted import planted_faults as planted_faults


@pytest.hookimpl(trylast=True)  # after the plugin's
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run canaries before the other tests that are not long: an instrument is checked before most rows use it.

    Of the tests that run alone, the kernels come first: after a model that filled the GPU's memory, memory-bound ones
    were slower by 10 %.
    """
    items.sort(
        key=lambda item: (*turn(item), ("kernels" if alone(item) else "canaries") not in item.path.parts)
    )


@pytest.hookimpl(optionalhook=True)  # without the plugin, the root conftest says so
def pytest_bumpgate_canaries() -> Mapping[str, Callable[[], None]]:
    from suites.support.canaries import CANARIES

    return CANARIES


@pytest.hookimpl(optionalhook=True)
def pytest_bumpgate_calibrations(lane: Lane) -> Mapping[str, Callable[[], float]]:
    from suites.support.calibrations import measures

    return {id: measure.function for id, measure in measures(lane).items()}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Release the GPU memory that torch has cached: the other workers' tests need it on a small card."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def restored_dynamo() -> Iterator[None]:
    """Restore Dynamo's configuration after the test and reset it: a trainer applies the contract to the process."""
    from bumpgate.plugin.instruments import dynamo_config, read_dynamo_config, reset_dynamo
    from launch.contract import load

    with dynamo_config(read_dynamo_config(load().dynamo)):
        yield
    reset_dynamo()


@pytest.fixture(autouse=True)
def gpu_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a lane of one GPU, no other process may use it during a test that requests `exclusive_machine`.

    Each of its timed rows carries the GPU's state, and is INFRA if that state invalidates times.
    """
    lane = lanes_of(request.config).get(lane_of(request.node) or "")
    one_gpu = lane is not None and lane.device == "cuda" and lane.count == 1
    if not one_gpu or "exclusive_machine" not in request.fixturenames or untimed():
        yield
        return
    from suites.support.gpu_state import alone_on_gpu

    with alone_on_gpu() as state:
        request.node.stash[MACHINE_STATE] = lambda: [state()]
        yield
