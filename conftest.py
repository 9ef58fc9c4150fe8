"""This repository's part of a lane run; bumpgate/plugin has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.plugin import scheduling
from bumpgate.plugin.lanes import lanes_of, named_lanes
from suites.support.environment import prepare_environment


@pytest.hookimpl(tryfirst=True)  # the plugin's is, too, and was registered earlier
def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment before the plugin checks the compile caches and looks for the lane's device."""
    if not config.pluginmanager.hasplugin("bumpgate.plugin"):
        raise pytest.UsageError(
            "bumpgate.plugin is not loaded: leave out -p no:bumpgate.plugin and -o addopts"
        )
    lane = next(iter(named_lanes(config)), None)
    parallel = bool(config.getoption("numprocesses", None))
    prepare_environment(lanes_of(config)[lane] if lane else None, parallel)
    if not lane:  # a lane run has it
        config.pluginmanager.register(scheduling, "scheduling")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests/ in a lane: it has no tests of a lane, and each worker would import all of it."""
    return True if named_lanes(config) and collection_path == config.rootpath / "tests" else None
