"""Order of a lane's tests, and their assignment to workers of xdist: one at a time, the longest first.

A test marked `long(seconds)` starts before shorter ones, so that no worker is still in it when the others have
finished; a single worker runs it after them, so that most rows are measured early. A test that needs the machine to
itself comes last, and one worker runs all of them, or one for each GPU: in between, it would wait for all others to
end, and they for it. Tests that use a fixture of module scope go to one worker, which makes it once. `--dist` selects
one of xdist's own schedulers instead.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from bumpgate.plugin.lanes import chosen_lane, lanes_of
from bumpgate.plugin.units import ALONE
from bumpgate.process.gpu_shares import visible


def alone(item: pytest.Item) -> bool:
    """Return whether a test needs the machine to itself."""
    return not ALONE.isdisjoint(getattr(item, "fixturenames", ()))


def is_fast(item: pytest.Item) -> bool:
    """Return whether `--fast` selects a test."""
    return not (alone(item) or item.get_closest_marker("long") or item.get_closest_marker("cold"))


def turn(item: pytest.Item) -> tuple[bool, bool, float]:
    """Return the sort key of a test. Those that run alone come last.

    Several workers start with the longest; a single one starts with those that `--fast` selects.
    """
    single = getattr(item.config, "workerinput", {}).get("workercount", 1) == 1
    seconds = 0.0 if alone(item) else _seconds(item) or 0.0
    return (alone(item), single and not is_fast(item), seconds if single else -seconds)


def _seconds(item: pytest.Item) -> float | None:
    """Return the seconds of a test's marker `long`, 0 without one; None if the marker has no number."""
    marker = item.get_closest_marker("long")
    seconds = marker.args[0] if marker and len(marker.args) == 1 else None if marker else 0.0
    return seconds if isinstance(seconds, (int, float)) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _seconds(item) is None:
        pytest.fail(f"{item.nodeid}: mark it with its seconds, as @pytest.mark.long(40)", pytrace=False)


@pytest.hookimpl(trylast=True)  # after pytest's own, which sorts by the parameters of session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast", False):
        config.hook.pytest_deselected(items=[item for item in items if not is_fast(item)])
        items[:] = [item for item in items if is_fast(item)]
    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    if config.option.dist != "load":
        return None
    if not hasattr(config.option, "loadscopereorder"):
        found = importlib.metadata.version("pytest-xdist")
        why = f"pytest-xdist {found} changes the order of the tests: pip install 'pytest-xdist>=3.8', or -n 0"
        raise pytest.UsageError(why)
    from bumpgate.plugin.assignment import TestByTest

    name = chosen_lane(config)
    return TestByTest(config, log, len(visible(lanes_of(config)[name].count)) if name else 1)
