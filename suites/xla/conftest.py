"""The v6e lane: torch_xla on PJRT, collected if torch_xla is installed.

The evidence of every row names the device it was measured on. In a process whose PJRT device is the CPU no row
claims a TPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from bumpgate.core.rows import Judgement
from bumpgate.plugin.rows import RowRecorder, list_not_run, report_canaries
from launch.xla import environment as xla_environment
from suites.support.lanes import PJRT_CPU, V6E

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
collect_ignore_glob = [] if HAS_XLA else ["test_*.py"]
if HAS_XLA:  # before any test file imports it: it reads its environment once
    xla_environment.enter(os.environ)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests in fresh processes first: only one process holds a TPU, and a child must get it before this one."""
    items.sort(key=lambda item: "suites/xla/" in item.nodeid and not item.get_closest_marker("fresh_process"))


@pytest.fixture(scope="session")
def device_class() -> str:
    """The device class of this process: pjrt-cpu or v6e."""
    return V6E if os.environ["PJRT_DEVICE"] == "TPU" else PJRT_CPU


class DeviceRows:
    """The row fixture, with the device in the evidence of each row. device: if it is not this process's."""

    def __init__(self, row: RowRecorder, device_class: str) -> None:
        self._row, self._device = row, device_class

    def __call__(
        self, id: str, *args: Any, device: str = "", evidence: Iterable[object] = (), **fields: Any
    ) -> Judgement:
        return self._row(id, *args, evidence=self._lines(device, evidence), **fields)

    def defect(
        self, id: str, present: bool, *, device: str = "", evidence: Iterable[object] = (), **fields: Any
    ) -> Judgement:
        return self._row.defect(id, present, evidence=self._lines(device, evidence), **fields)

    def _lines(self, device: str, evidence: Iterable[object]) -> list[str]:
        return [f"device {device or self._device}", *map(str, evidence)]


@pytest.fixture
def row(row: RowRecorder, device_class: str) -> DeviceRows:
    return DeviceRows(row, device_class)


@pytest.fixture
def canaries() -> Callable[..., None]:
    """Check the named XLA instruments in this process, once."""
    from suites.support.canaries import prove
    from suites.xla.canaries import XLA_CANARIES

    return lambda *names: report_canaries(prove(names, XLA_CANARIES))


@pytest.fixture(autouse=True)
def only_on_a_tpu(request: pytest.FixtureRequest, device_class: str) -> None:
    """Skip a test that needs a TPU elsewhere, and list its rows as NOT RUN."""
    mark = request.node.get_closest_marker("needs_tpu")
    if mark is None or device_class == V6E:
        return
    reason, rows = mark.args
    list_not_run(request.node, rows, reason)
    pytest.skip(f"not run: {reason}")
