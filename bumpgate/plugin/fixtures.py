"""The fixtures of the plugin. Each imports its modules, torch included, when a test first requests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bumpgate.plugin.instruments import DynamoWatch, InductorReport
    from bumpgate.plugin.instruments.memory import Peak
    from bumpgate.plugin.instruments.work import Work
    from bumpgate.plugin.rows import RowRecorder
    from bumpgate.plugin.timing import Rounds


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[RowRecorder]:
    """Report measured values; see bumpgate.plugin.rows.RowRecorder for its verbs."""
    from bumpgate.plugin.rows import recorder

    yield from recorder(request)


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest) -> None:
    """For timed tests: no other lane test of this user runs meanwhile (bumpgate/plugin/sharing.py takes the lock)."""


@pytest.fixture
def paired_timer(exclusive_machine: None) -> Callable[..., Rounds]:
    """bumpgate.plugin.timing.interleaved: CPU and wall seconds of functions that alternate, paired in a gate.

    The returned function returns Rounds.
    """
    from bumpgate.plugin.timing import interleaved

    return interleaved


@pytest.fixture
def peak_memory(exclusive_machine: None) -> Callable[..., Peak]:
    """Measure the most memory that a function holds at once (bumpgate.plugin.instruments.memory.peak_memory)."""
    from bumpgate.plugin.instruments.memory import peak_memory

    return peak_memory


@pytest.fixture
def canaries(request: pytest.FixtureRequest) -> Callable[..., dict[str, str]]:
    """Check the named instruments in this process, once, and make every row of the test depend on them.

    The returned function takes the names of canaries: the plugin's and what pytest_bumpgate_canaries adds. It returns
    name -> reason of a failure, "" for a pass. A row is INSTRUMENT if one of its canaries failed.
    """
    from bumpgate.core.rows import RowError
    from bumpgate.plugin.instruments.canaries import CANARIES, prove
    from bumpgate.plugin.rows import CANARY_RESULTS, INSTRUMENTS

    item, known = request.node, request.config.stash.setdefault(CANARY_RESULTS, {})

    def require(*names: str) -> dict[str, str]:
        programs = dict(CANARIES)
        for more in item.ihook.pytest_bumpgate_canaries():
            programs |= more
        if unknown := [name for name in names if name not in programs]:
            raise RowError(f"no canary {unknown[0]!r}; canaries: {', '.join(programs)}")
        known.update(prove({name: programs[name] for name in names if name not in known}))
        item.stash[INSTRUMENTS] = tuple(dict.fromkeys((*item.stash.get(INSTRUMENTS, ()), *names)))
        return {name: known[name] for name in names}

    return require


@pytest.fixture
def count_work(canaries: Callable[..., object]) -> Callable[..., Work]:
    """Count FLOPs, bytes, operators and launches of a call (bumpgate.plugin.instruments.work.count_work).

    Every row of the test is INSTRUMENT if its canary fails.
    """
    from bumpgate.plugin.instruments.work import count_work

    canaries("work")
    return count_work


@pytest.fixture
def dynamo_watch(canaries: Callable[..., object]) -> type[DynamoWatch]:
    """bumpgate.plugin.instruments.DynamoWatch: graphs, breaks with reason and call site, recompiles with their guards.

    Every row of the test is INSTRUMENT if one of its canaries fails.
    """
    from bumpgate.plugin.instruments import DynamoWatch

    canaries("graphs", "graph_breaks", "recompiles")
    return DynamoWatch


@pytest.fixture
def inductor_watch(
    canaries: Callable[..., object],
) -> Callable[..., AbstractContextManager[InductorReport]]:
    """bumpgate.plugin.instruments.inductor_watch: generated kernels, bytes, cache events by layer, CPU seconds.

    Every row of the test is INSTRUMENT if one of its canaries fails.
    """
    from bumpgate.plugin.instruments import inductor_watch

    canaries("inductor", "cache")
    return inductor_watch
