"""suites.support.idle: waiting for other tests' work to end."""

from __future__ import annotations

import os

import psutil
import pytest

from suites.support.idle import IDLE, wait_for_idle_cores


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Percent of each of four cores in the next windows, the last one repeated; this process has the first two."""
    windows: list[list[float]] = []

    def read(interval: float, percpu: bool) -> list[float]:
        assert interval > 0
        assert percpu
        return windows.pop(0) if len(windows) > 1 else windows[0]

    monkeypatch.setattr(psutil, "cpu_percent", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return windows


def test_waits_for_its_own_cores(usage: list[list[float]]) -> None:
    usage += [[100, 100, 0, 0], [IDLE + 1, IDLE, 0, 0], [2 * IDLE, 0, 100, 100], [100, 100, 100, 100]]
    assert wait_for_idle_cores(60)
    assert usage == [[100, 100, 100, 100]], "idle at the third reading"


def test_gives_up_on_cores_that_stay_busy(usage: list[list[float]]) -> None:
    usage += [[100, 100, 0, 0]]
    assert not wait_for_idle_cores(0.05)
