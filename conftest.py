"""The suite's part of a lane run; bumpgate/plugin has its options. A refusal is one line and exit code 4."""

from __future__ import annotations

import os
import sys

import pytest

from bumpgate.baseline import BaselineError
from bumpgate.plugin import chosen_lane
from suites.support import rows
from suites.support.environment import cache_fault, prepare_environment
from suites.support.lanes import detect
from suites.support.session import LaneSession, Selection


@pytest.hookimpl(trylast=True)  # after the plugins that declare markers
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("bumpgate.plugin"):
        raise pytest.UsageError(
            "bumpgate.plugin is not loaded: leave out -p no:bumpgate.plugin and -o addopts"
        )
    if sys.flags.optimize:
        raise pytest.UsageError(
            "PYTHONOPTIMIZE or -O removes the checks that are assert statements: leave it out"
        )
    lane = chosen_lane(config)
    prepare_environment(lane)
    selection = Selection(config, lane)
    _register(config, selection, "bumpgate-selection")
    _register(config, rows, "bumpgate-rows")
    if hasattr(config, "workerinput"):
        return  # the controller has checked everything once
    fault = cache_fault() or (detect(lane) if lane else None)
    if fault:
        raise pytest.UsageError(fault)
    if config.option.gate and config.option.collectonly:
        raise pytest.UsageError("--collect-only measures nothing: leave it out, or leave out --gate")
    if config.option.gate:
        os.environ["BUMPGATE_GATE"] = "1"  # nothing that a gate starts may rewrite a baseline
    if lane and not config.option.collectonly:
        try:
            baseline = rows.lane_baseline(rows.baseline_path(config, lane), lane)
        except BaselineError as error:
            raise pytest.UsageError(str(error)) from None
        _register(config, LaneSession(config, baseline, selection), "bumpgate-session")


def _register(config: pytest.Config, plugin: object, name: str) -> None:
    """Raises UsageError if -p blocks the plugin, without which a lane judges nothing."""
    if config.pluginmanager.register(plugin, name) is None:
        raise pytest.UsageError(f"-p no:{name}: a lane run needs this plugin: leave the option out")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """On a GPU a test a time, for one that compiles for a minute must not have others queue behind it."""
    if chosen_lane(config) != "h200":
        return None
    from suites.support.scheduling import TestByTest

    return TestByTest(config, log)
