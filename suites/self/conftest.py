"""Fixtures of the suite's own tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.self.project import Project
from suites.support.lanes import LANES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these tests in lane runs: they belong to no lane, and a lane's environment lacks their imports."""
    markers = re.findall(r"\w+", config.option.markexpr)
    return True if set(markers) & set(LANES) and collection_path.name.startswith("test_") else None


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    made.end()
