"""pytest-benchmark in a lane: its fixture times, also next to xdist's workers, and the median is a timed row.

pytest-benchmark disables itself under xdist, since workers disturb each other. In a lane one worker runs such tests
while the others wait, so its fixture is enabled again.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from bumpgate.core import outcomes
from bumpgate.plugin.lanes import lane_of
from bumpgate.plugin.rows import list_not_run, recorder_of
from bumpgate.plugin.timing import Median

# Options of results that pytest-benchmark shows or judges at the end of the process that measured them.
IN_ONE_PROCESS = ("compare", "compare_fail", "histogram", "only")
# The value of its option `benchmark_disable`, which workers inherit, if xdist is the reason.
BY_XDIST = "by xdist"


def needs_one_process(config: pytest.Config) -> str:
    """Return the option of pytest-benchmark that workers of xdist cannot serve, "" if none is given."""
    given = (name for name in IN_ONE_PROCESS if getattr(config.option, f"benchmark_{name}", None))
    return next((f"--benchmark-{name.replace('_', '-')}" for name in given), "")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    enabled = option.benchmark_enable or not option.benchmark_disable
    if enabled and (getattr(option, "dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ):
        if name := needs_one_process(config):
            raise pytest.UsageError(f"{name} needs all benchmarks in one process: add -n 0")
        option.benchmark_enable, option.benchmark_disable = False, BY_XDIST


@pytest.hookimpl(wrapper=True, trylast=True)  # within the hook that fails a test for its red rows
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    fixture: Any = getattr(item, "funcargs", {}).get("benchmark")
    if fixture is not None and item.config.option.benchmark_disable == BY_XDIST:
        fixture.disabled = False
    result = yield
    if fixture is not None:
        _report(item, fixture)
    return result


def _report(item: pytest.Item, fixture: Any) -> None:
    """Report the median as a row, which a gate measures in paired sessions, or list it as NOT RUN."""
    lane = lane_of(item)
    id = f"benchmark/{outcomes.case(item.nodeid)}/median_seconds"
    stats = getattr(getattr(fixture, "stats", None), "stats", None)
    if lane and stats:
        spread = f"{stats.rounds} rounds from {stats.min:.3g} to {stats.max:.3g} s"
        found, median = Median.of(stats.data, lines=(spread,)), float(stats.median)
        # Of an even number of rounds, this median is the geometric mean of the two in the middle.
        shown = replace(found, median=median, low=min(found.low, median), high=max(found.high, median))
        recorder_of(item, lane).timed(id, shown, "s", paired=True)
    elif lane and fixture.disabled:
        list_not_run(item, [id], "pytest-benchmark is disabled: leave out --benchmark-disable")
