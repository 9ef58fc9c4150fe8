"""Sharing of the machine: lane tests run next to each other, a timed test runs alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bumpgate.plugin import lane_of, lanes_of
from bumpgate.plugin.duet import partner
from bumpgate.plugin.scheduling import alone


def pytest_configure() -> None:
    """Take the cores of this side of a paired session before any thread pool is created for the complete machine."""
    partner()


@pytest.fixture(autouse=True)
def machine_share(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the machine shared; exclusively for a test that requests `exclusive_machine` or `benchmark`.

    In a paired session, the leading side holds it for both. On a GPU all tests that wait for it are in one worker,
    which lets the others run first.
    """
    duet, lane = partner(), lane_of(request.node)
    if lane is None or (duet and not duet.leads):
        yield
        return
    from bumpgate.plugin.timing import machine

    patient = lanes_of(request.config)[lane].device == "cuda"
    with machine(exclusive=alone(request.node), patient=patient):
        yield
