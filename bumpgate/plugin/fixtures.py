"""The fixtures of the plugin. Each imports what it needs when a test first requests it, torch among it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bumpgate.plugin.rows import RowRecorder
    from bumpgate.plugin.timing import Rounds


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[RowRecorder]:
    """Reports measured values; see bumpgate.plugin.rows.RowRecorder.__call__ for the signature."""
    from bumpgate.plugin.rows import recorder

    yield from recorder(request)


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest) -> None:
    """For timed tests: no other lane test of this user runs meanwhile (bumpgate/plugin/sharing.py takes the lock)."""


@pytest.fixture
def paired_timer(exclusive_machine: None) -> Callable[..., Rounds]:
    """bumpgate.plugin.timing.interleaved: CPU and wall times of functions that alternate, paired in a gate."""
    from bumpgate.plugin.timing import interleaved

    return interleaved
