"""Lanes and flags of the suite. Every refusal is one line and exit code 4, before a test is collected."""

from __future__ import annotations

import os
import re

import pytest

from bumpgate.baseline import BaselineError
from suites.support import rows
from suites.support.environment import cache_fault, prepare_environment
from suites.support.lanes import LANES, detect
from suites.support.session import LaneSession, Selection

# Each worker of the H200 lane holds a context and its last test's memory on the GPU. One waits for the others' end, to
# run what is timed.
MOST_WORKERS = 15
SPARE_CORES = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bumpgate")
    group.addoption(
        "--gate", action="store_true", help="a skip, an xpass or a deselected lane test is red too"
    )
    group.addoption(
        "--launcher", metavar="COMMAND", help="whose environment and exit codes suites/launch judges (ours)"
    )
    # With = and no space: pytest's first look at the line takes a file that exists for a test path.
    group.addoption(
        "--record", metavar="PATH", help="--record=PATH: where the rows go (default: record.json)"
    )


@pytest.hookimpl(trylast=True)  # after the plugins that declare markers
def pytest_configure(config: pytest.Config) -> None:
    lane = chosen_lane(config)
    prepare_environment(lane)
    selection = Selection(config, lane)
    config.pluginmanager.register(selection, "bumpgate-selection")
    config.pluginmanager.register(rows, "bumpgate-rows")
    if hasattr(config, "workerinput"):
        return  # the controller has checked everything once
    fault = cache_fault() or (detect(lane) if lane else None)
    if fault:
        raise pytest.UsageError(fault)
    if config.option.gate:
        os.environ["BUMPGATE_GATE"] = "1"  # nothing that a gate starts may rewrite a baseline
    if lane and not config.option.collectonly:
        try:
            baseline = rows.lane_baseline(rows.baseline_path(config, lane), lane)
        except BaselineError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(LaneSession(config, baseline, selection), "bumpgate-session")


def chosen_lane(config: pytest.Config) -> str | None:
    """The lane that -m asks for. Raises UsageError on two lanes, or on a name that is no marker."""
    expression = re.sub(r"\([^()]*=[^()]*\)", "", config.option.markexpr)
    names = set(re.findall(r"[\w:+\-.\[\]\\/]+", expression)) - {"and", "or", "not"}
    known = {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers")}
    unknown = sorted(names - known)
    if unknown:
        raise pytest.UsageError(f"-m {expression}: no marker {unknown[0]!r}; lanes: {', '.join(LANES)}")
    chosen = [lane for lane in LANES if lane in names and not re.search(rf"\bnot\s+{lane}\b", expression)]
    if len(chosen) > 1:
        raise pytest.UsageError(f"-m {expression}: one lane a run, pick one of {', '.join(chosen)}")
    return chosen[0] if chosen else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of `-n auto`, the default. A worker at least: a crash or a hang then costs one test, not the run.

    On a GPU as many as its machine has cores for: nearly all of the lane's time is compiling.
    """
    if chosen_lane(config) != "h200":
        return 1
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - SPARE_CORES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """On a GPU a test a time, for one that compiles for a minute must not have others queue behind it."""
    if chosen_lane(config) != "h200":
        return None
    from suites.support.scheduling import TestByTest

    return TestByTest(config, log)
