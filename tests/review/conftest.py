"""Shared by the tests of adoption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adopting import AdoptTree


@pytest.fixture
def tree(gated: AdoptTree, tmp_path: Path) -> Iterator[AdoptTree]:
    """A copy of the module's tree with its gates, for one test."""
    made = gated.copy(tmp_path / "tree", tmp_path / "home")
    yield made
    made.end()
