"""This repository's part of a lane run; bumpgate/plugin has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.plugin import chosen_lane, lanes_of, named_lanes
from suites.support.environment import prepare_environment


@pytest.hookimpl(tryfirst=True)  # the plugin's is, too, and was registered earlier
def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment before the plugin checks the compile caches and looks for the lane's device."""
    if not config.pluginmanager.hasplugin("bumpgate.plugin"):
        raise pytest.UsageError(
            "bumpgate.plugin is not loaded: leave out -p no:bumpgate.plugin and -o addopts"
        )
    workers = bool(config.getoption("numprocesses", None))
    prepare_environment(next(iter(named_lanes(config)), None), workers)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests/ in a lane: it has no tests of a lane, and each worker would import all of it."""
    return True if named_lanes(config) and collection_path == config.rootpath / "tests" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Assign one test at a time on a GPU, so that a long compile does not block queued tests."""
    lane = chosen_lane(config)
    if lane is None or lanes_of(config)[lane].device != "cuda":
        return None
    from suites.support.scheduling import TestByTest

    return TestByTest(config, log)
