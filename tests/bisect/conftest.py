"""What the tests of `bumpgate bisect` on real environments share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builds import Bisect, bisecting


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv's cache and the environments, shared by the tests of a file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Bisect]:
    with bisecting(tmp_path) as call:
        yield call
