"""Fixtures of the tests of gates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gate_tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """A miniature tree whose gates run real processes."""
    made = Tree(tmp_path)
    yield made
    made.end()
