"""Fixtures of the suite's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.self.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    made.end()
