"""The v6e lane: torch_xla on PJRT, collected if torch_xla is installed.

Every row's first line of evidence is the device it was measured on. In a process whose PJRT device is the CPU no row
claims a TPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from bumpgate.core.rows import Judgement
from bumpgate.plugin.rows import NOT_RUN_PROPERTY, report_canaries
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


@pytest.fixture
def row(row: Callable[..., Judgement], device_class: str) -> Callable[..., Judgement]:
    """The row fixture, with the device recorded in each row. device: if it is not this process's."""

    def recorded_row(
        id: str, *args: Any, device: str = "", evidence: Iterable[object] = (), **fields: Any
    ) -> Judgement:
        return row(id, *args, evidence=[f"device {device or device_class}", *map(str, evidence)], **fields)

    return recorded_row


@pytest.fixture
def canaries() -> Callable[..., None]:
    """Check the named XLA instruments in this process, once."""
    from suites.support.canaries import prove
    from suites.xla.canaries import XLA_CANARIES

    return lambda *names: report_canaries(prove(names, XLA_CANARIES))


@pytest.fixture(autouse=True)
def only_on_a_tpu(
    request: pytest.FixtureRequest, device_class: str, record_property: Callable[[str, object], None]
) -> None:
    """Skip a test that needs a TPU elsewhere, and list its rows as NOT RUN."""
    mark = request.node.get_closest_marker("needs_tpu")
    if mark is None or device_class == V6E:
        return
    reason, rows = mark.args
    record_property(NOT_RUN_PROPERTY, json.dumps([f"{row}: {reason}" for row in rows]))
    pytest.skip(f"not run: {reason}")
