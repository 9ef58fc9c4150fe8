"""Fixtures of every lane test: proved instruments, and a machine to itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from suites.support.duet import partner
from suites.support.lanes import lane_of
from suites.support.planted import tell
from suites.support.rows import MACHINE_STATE, baseline_path, lane_baseline, report_canaries
from suites.support.scheduling import turn


def pytest_configure() -> None:
    """One side of a paired session takes its cores before anything makes a thread pool as wide as the machine."""
    partner()


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


@pytest.fixture(autouse=True)
def machine_share(request: pytest.FixtureRequest) -> Iterator[None]:
    """A lane test shares the machine with others; one that asks for `exclusive_machine` waits until it has it alone.

    Of the two sides of a paired session the one that leads has it for both. On a GPU those that wait for it are all in
    one worker, which lets the others go first.
    """
    duet, lane = partner(), lane_of(request.node)
    if lane is None or (duet and not duet.leads):
        yield
        return
    from suites.support.timing import machine

    with machine(exclusive="exclusive_machine" in request.fixturenames, patient=lane == "h200"):
        yield


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest, machine_share: None) -> Iterator[None]:
    """Asked for by timed tests: nothing else of ours runs while they do, and on a GPU nobody else's.

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
