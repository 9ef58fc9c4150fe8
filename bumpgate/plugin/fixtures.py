"""The fixtures of the plugin. Each imports its modules, torch included, when a test first requests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bumpgate.plugin.instruments import DynamoWatch, InductorReport
    from bumpgate.plugin.rows import RowRecorder
    from bumpgate.plugin.timing import Rounds


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[RowRecorder]:
    """Report measured values; see bumpgate.plugin.rows.RowRecorder.__call__ for the signature."""
    from bumpgate.plugin.rows import recorder

    yield from recorder(request)


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest) -> None:
    """For timed tests: no other lane test of this user runs meanwhile (bumpgate/plugin/sharing.py takes the lock)."""


@pytest.fixture
def paired_timer(exclusive_machine: None) -> Callable[..., Rounds]:
    """bumpgate.plugin.timing.interleaved: CPU and wall seconds of functions that alternate, paired in a gate.

    The returned function returns Rounds. Raises InfraError if no round was quiet.
    """
    from bumpgate.plugin.timing import interleaved

    return interleaved


@pytest.fixture
def canaries() -> Callable[..., None]:
    """Check the named instruments in this process, once; a row that names an unchecked one is INSTRUMENT."""
    from bumpgate.plugin.instruments.canaries import prove
    from bumpgate.plugin.rows import report_canaries

    return lambda *names: report_canaries(prove(names))


@pytest.fixture
def dynamo_watch(request: pytest.FixtureRequest, canaries: Callable[..., None]) -> type[DynamoWatch]:
    """bumpgate.plugin.instruments.DynamoWatch: graphs, breaks with reason and call site, recompiles with their guards.

    Every row of the test is INSTRUMENT if one of its canaries fails.
    """
    from bumpgate.plugin.instruments import DynamoWatch

    _require(request, canaries, "graphs", "graph_breaks", "recompiles")
    return DynamoWatch


@pytest.fixture
def inductor_watch(
    request: pytest.FixtureRequest, canaries: Callable[..., None]
) -> Callable[[], AbstractContextManager[InductorReport]]:
    """bumpgate.plugin.instruments.inductor_watch: generated kernels, bytes, cache events by layer.

    Every row of the test is INSTRUMENT if one of its canaries fails.
    """
    from bumpgate.plugin.instruments import inductor_watch

    _require(request, canaries, "inductor", "cache")
    return inductor_watch


def _require(request: pytest.FixtureRequest, canaries: Callable[..., None], *names: str) -> None:
    """Check these instruments, and make every row of the test depend on them."""
    from bumpgate.plugin.rows import INSTRUMENTS

    canaries(*names)
    request.node.stash[INSTRUMENTS] = (*request.node.stash.get(INSTRUMENTS, ()), *names)
