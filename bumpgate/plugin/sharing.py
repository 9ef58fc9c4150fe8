"""Who has the machine: a lane test shares it with others, a timed one has it alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bumpgate.plugin import lane_of, lanes_of
from bumpgate.plugin.duet import partner


def pytest_configure() -> None:
    """One side of a paired session takes its cores before anything makes a thread pool as wide as the machine."""
    partner()


@pytest.fixture(autouse=True)
def machine_share(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds the machine shared; exclusively for a test that requests `exclusive_machine` or `benchmark`.

    Of the two sides of a paired session the one that leads has it for both. On a GPU those that wait for it are all in
    one worker, which lets the others go first.
    """
    duet, lane = partner(), lane_of(request.node)
    if lane is None or (duet and not duet.leads):
        yield
        return
    from bumpgate.plugin.timing import machine

    patient = lanes_of(request.config)[lane].device == "cuda"
    alone = {"exclusive_machine", "benchmark"} & set(request.fixturenames)
    with machine(exclusive=bool(alone), patient=patient):
        yield
