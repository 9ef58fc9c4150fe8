"""The search with builds that cannot be probed: it jumps over them, and reports a range next to the change."""

from __future__ import annotations

from typing import Any

import pytest

from bumpgate.bisect import search
from bumpgate.bisect.search import ProbeOutcome, Search
from tests.support.searching import drive, labels, mutant_of


def check_skips(module: Any, n: int = 18) -> None:
    """Every run of up to four broken builds, with every fault position: the answer is as exact as possible."""
    for first_bad in range(1, n):
        for start in range(1, n - 1):
            for stop in range(start + 1, min(start + 5, n)):
                broken = range(start, min(stop, n - 1))
                searched = module.Search(labels(n), labels(n)[0], labels(n)[-1])
                result = drive(
                    searched,
                    lambda i: "SKIP" if i in broken else "BAD" if i >= first_bad else "GOOD",  # noqa: B023
                    limit=40,
                )
                low, high = first_bad, first_bad
                while low - 1 in broken:
                    low -= 1
                while high in broken:
                    high += 1
                assert result.suspects == tuple(range(low, high + 1)), (first_bad, broken, result)
                assert result.last_old == low - 1


def test_broken_builds_next_to_the_change_give_a_range() -> None:
    check_skips(search)


def test_mutant_that_ignores_skips_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_skips(mutant_of(search, "            self._aside.add(index)\n", "            pass\n"), n=8)


def test_mutant_that_omits_skipped_builds_is_caught() -> None:
    mutant = mutant_of(
        search, "                classes[-1].append(k)\n", "                classes.append([k])\n"
    )
    with pytest.raises(AssertionError):
        check_skips(mutant, n=8)


def skips_taken(module: Any) -> float:
    """Mean number of failed installs if 20 nights in the middle of 60 are broken and the fault is elsewhere."""
    broken, taken = range(20, 40), []
    for first_bad in (*range(1, 20), *range(41, 60)):
        searched = module.Search(labels(60), labels(60)[0], labels(60)[-1])
        result = drive(searched, lambda i: "SKIP" if i in broken else "BAD" if i >= first_bad else "GOOD")  # noqa: B023
        assert result.suspects == (first_bad,)
        taken.append(sum(outcome.value == "SKIP" for _, outcome in searched.history))
    return sum(taken) / len(taken)


def test_search_jumps_over_a_long_run_of_broken_builds() -> None:
    """The control, a mutant, tries them one after another."""
    control = skips_taken(
        mutant_of(search, "gains[i - self.first] * self._installs(i)", "gains[i - self.first]")
    )
    assert skips_taken(search) <= 4 < control / 2, (skips_taken(search), control)


def test_unknown_outcome_is_retried_then_set_aside() -> None:
    searched = Search(labels(4), labels(4)[0], labels(4)[-1])
    result = drive(searched, lambda i: "UNKNOWN" if i == 1 else "BAD" if i >= 2 else "GOOD")
    assert result.suspects == (1, 2)
    assert [i for i, _ in searched.history].count(1) == search.UNKNOWN_LIMIT


def test_verdict_before_a_skip_still_counts() -> None:
    searched = Search(labels(5), labels(5)[0], labels(5)[-1])
    for index, outcome in ((0, "GOOD"), (4, "BAD"), (2, "GOOD"), (2, "SKIP"), (3, "SKIP")):
        searched.record(index, ProbeOutcome[outcome])
    result = searched.result()
    assert result is not None
    assert result.suspects == (3, 4)
