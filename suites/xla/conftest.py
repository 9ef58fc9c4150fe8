"""The v6e lane: torch_xla on PJRT, collected if torch_xla is installed.

The evidence of every row names the device it was measured on. In a process whose PJRT device is the CPU no row
claims a TPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping

import pytest

from bumpgate.plugin.rows import list_not_run
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


@pytest.fixture(autouse=True)
def device_of_rows(request: pytest.FixtureRequest, device_class: str) -> None:
    """Name the device in the evidence of each row: this process's, or the argument of the marker `measured_on`."""
    if "row" in request.fixturenames:
        mark = request.node.get_closest_marker("measured_on")
        request.getfixturevalue("row").context = (f"device {mark.args[0] if mark else device_class}",)


@pytest.hookimpl(optionalhook=True)  # without the plugin, the root conftest says so
def pytest_bumpgate_canaries() -> Mapping[str, Callable[[], None]]:
    from suites.xla.canaries import XLA_CANARIES

    return XLA_CANARIES


@pytest.fixture(autouse=True)
def only_on_a_tpu(request: pytest.FixtureRequest, device_class: str) -> None:
    """Skip a test that needs a TPU elsewhere, and list its rows as NOT RUN."""
    mark = request.node.get_closest_marker("needs_tpu")
    if mark is None or device_class == V6E:
        return
    reason, rows = mark.args
    list_not_run(request.node, rows, reason)
    pytest.skip(f"not run: {reason}")
