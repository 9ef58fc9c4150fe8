"""A pytest plugin that names the running test to coverage, and writes the duration of each test that passed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

# Variables: the running test, which child processes inherit; the folder for the durations.
NAME, FOLDER = "COVERED_TEST", "COVERED_FOLDER"
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure one test under its name."""
    measured = coverage.Coverage.current()
    if measured:
        measured.switch_context(item.nodeid)
    os.environ[NAME] = item.nodeid
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        del os.environ[NAME]
        if measured:
            measured.switch_context("")
        if not item.stash.get(FAILED, False):
            path = Path(os.environ[FOLDER]) / f"tests-{os.getpid()}.jsonl"
            with path.open("a", encoding="utf-8") as f:
                f.write(json.dumps([item.nodeid, time.monotonic() - begun]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a test that did not pass: it judges nothing."""
    report = yield
    if not report.passed:
        item.stash[FAILED] = True
    return report
