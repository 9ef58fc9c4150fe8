"""Rows of pytest-benchmark: the median of a test's fixture `benchmark` is a timed row, without changes to the test."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from bumpgate.core.outcomes import case
from bumpgate.plugin.lanes import lane_of
from bumpgate.plugin.rows import recorder_of


def row_id(nodeid: str) -> str:
    """Return the row id of a benchmark: "a/test_b.py::test_c[3]" -> "benchmark/a-test_b-test_c-3/median_seconds"."""
    return f"benchmark/{case(nodeid)}/median_seconds"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Report the benchmark of a lane test that requests the fixture; a gate measures its row in paired sessions.

    Under --gate a benchmark that is switched off fails the test.
    """
    result = yield
    lane = lane_of(item)
    fixture: Any = getattr(item, "funcargs", {}).get("benchmark")
    if lane is None or fixture is None:
        return result
    if getattr(fixture, "disabled", False) and item.config.option.gate:
        pytest.fail(
            "pytest-benchmark is disabled (by xdist or an option) under --gate: run with -n 0", pytrace=False
        )
    stats = getattr(getattr(fixture, "stats", None), "stats", None)
    if stats:
        spread = f"{stats.rounds} rounds from {stats.min:.3g} to {stats.max:.3g} s"
        row = recorder_of(item, lane)
        row.cost(
            row_id(item.nodeid), float(stats.median), "s", seen=stats.rounds, evidence=[spread], paired=True
        )
    return result
