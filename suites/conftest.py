"""Fixtures of every lane test: proved instruments, and a machine to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from suites.support.lanes import lane_of
from suites.support.planted import tell
from suites.support.rows import report_canaries


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Canaries first: what an instrument is worth is known before anything is measured with it."""
    items.sort(key=lambda item: "canaries" not in item.path.parts)


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
    """A lane test shares the machine with others; one that asks for `exclusive_machine` waits until it has it alone."""
    if lane_of(request.node) is None:
        yield
        return
    from suites.support.timing import machine

    with machine(exclusive="exclusive_machine" in request.fixturenames):
        yield


@pytest.fixture
def exclusive_machine(machine_share: None) -> None:
    """Asked for by timed tests: nothing else of ours runs while they do."""
