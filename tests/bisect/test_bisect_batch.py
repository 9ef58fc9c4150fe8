"""Batches of parallel probes: they give the answer of the sequential search, in fewer rounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from bumpgate.bisect import batch as batches
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.search import ProbeOutcome, Search, SearchResult
from tests.support.searching import labels, mutant_of, noisy


def search(nights: int = 60, misreads: float | None = 0.0) -> Search:
    names = tuple(labels(nights))
    return BisectPlan(names, names[0], names[-1], (), misreads, misreads).search()


def rounds(module: Any, searched: Search, first_bad: int, workers: int) -> tuple[int, SearchResult]:
    """Run to the end without misreads; return the number of rounds and the answer."""
    count = 0
    while due := module.batch(searched, workers):
        assert len(due) <= workers
        count += 1
        for index in due:
            searched.record(index, ProbeOutcome.BAD if index >= first_bad else ProbeOutcome.GOOD)
        assert count < 99
    result = searched.result()
    assert result is not None
    return count, result


def check_four_workers(module: Any) -> None:
    """60 nights, every place of the fault: at most three rounds after that of the ends."""
    for first_bad in range(1, 60):
        count, result = rounds(module, search(), first_bad, 4)
        assert (result.suspects, result.confirmed) == ((first_bad,), True)
        assert count <= 1 + 3


def test_four_workers_need_at_most_three_rounds_after_ends() -> None:
    check_four_workers(batches)


def test_batch_for_one_worker_equals_sequential_search() -> None:
    searched = search(20, None)
    read = noisy(7, 0.1, 0.1, random.Random(3))
    while due := searched.next():
        assert batches.batch(searched, 1) == due[:1]
        searched.record(due[0], ProbeOutcome[read(due[0])])


def test_batch_excludes_skipped_candidate() -> None:
    searched = search(9)
    for index, outcome in ((0, ProbeOutcome.GOOD), (8, ProbeOutcome.BAD), (4, ProbeOutcome.SKIP)):
        searched.record(index, outcome)
    assert 4 not in batches.batch(searched, 8)
    assert len(set(batches.batch(searched, 3))) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("outcomes = [([(due[0], ahead.new)], new), ([(due[0], ahead.old)], 1 - new)]", "outcomes = []"),
        ("if chosen.count(index) < counts[index] and", "if index not in chosen and"),
        ("new = ahead.chance(due[0])", "new = 1.0"),
    ],
)
def test_mutant_of_batch_is_caught(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_four_workers(mutant_of(batches, old, new))


def test_chance_matches_the_posterior() -> None:
    searched = search(60, 0.1)
    searched.record(0, ProbeOutcome.GOOD)
    searched.record(59, ProbeOutcome.BAD)
    chances = [searched.chance(i) for i in range(60)]
    assert chances == sorted(chances)
    assert math.isclose(chances[29] + chances[30], 1, abs_tol=0.01)
    assert chances[0] < 0.2 < 0.8 < chances[59]
