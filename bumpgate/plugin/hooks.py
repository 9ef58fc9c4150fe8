"""Hooks that a conftest of a repository may implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bumpgate.core.lanes import Lane


def pytest_bumpgate_canaries() -> Mapping[str, Callable[[], None]]:  # type: ignore[empty-body]
    """Return further canaries by name, for the tests below this conftest.

    A canary is a function that raises if its instrument does not read a known count.
    """


def pytest_bumpgate_calibrations(lane: Lane) -> Mapping[str, Callable[[], float]]:  # type: ignore[empty-body]
    """Return functions that measure the host, by row id `calibration/<bound>/<metric>`, for the tests below this
    conftest.

    Each is called once per process, before the first test that has the machine to itself.
    """
