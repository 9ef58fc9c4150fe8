"""Fixtures of every lane test of this repository, on top of the plugin's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from bumpgate.plugin import lane_of
from bumpgate.plugin.rows import MACHINE_STATE, baseline_path, lane_baseline, report_canaries
from suites.support.planted import tell
from suites.support.scheduling import turn


@pytest.hookimpl(trylast=True)  # behind pytest's own, which sorts by the parameters of the session's fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Canaries first: what an instrument is worth is known before anything is measured with it.

    On a GPU what is long comes before them, and the tests that want the machine to themselves come last: one among the
    others would wait for all of them to end, and they for it. What the others compile is on disk by then.
    """
    items.sort(key=lambda item: (*_turn_on_gpu(item), "canaries" not in item.path.parts))


def _turn_on_gpu(item: pytest.Item) -> tuple[int, int]:
    if lane_of(item) != "h200":
        return 0, 0
    alone = "exclusive_machine" in getattr(item, "fixturenames", ())
    return turn(item.nodeid, alone)


@pytest.fixture
def canaries() -> Callable[..., None]:
    """Proves the named instruments in this process, once; a row that names an unproved one is INSTRUMENT."""
    from suites.support.canaries import prove

    return lambda *names: report_canaries(prove(names))


@pytest.fixture(autouse=True)
def planted_faults(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """The mutant matrix counts the faults that a test says it plants."""
    for mark in request.node.iter_markers("planted"):
        tell(record_property, *mark.args)


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest, exclusive_machine: None) -> Iterator[None]:
    """The plugin's, and on an H200 no other process may use the GPU.

    There each row of a cost or a gain carries the GPU's state, and is INFRA in one that spoils times.
    """
    if lane_of(request.node) != "h200":
        yield
        return
    from suites.support.gpu_state import alone_on_gpu

    with alone_on_gpu() as state:
        request.node.stash[MACHINE_STATE] = lambda: [state(), *_anchors(request.config)]
        yield


def _anchors(config: pytest.Config) -> list[str]:
    """This run's ceilings beside the reviewed ones, where a test of this process has measured any."""
    gpu_timing = sys.modules.get("suites.support.gpu_timing")
    reviewed = lane_baseline(baseline_path(config, "h200"), "h200").rows
    return gpu_timing.beside_reviewed(reviewed) if gpu_timing else []
