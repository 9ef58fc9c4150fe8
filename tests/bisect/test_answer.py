"""What an interrupted bisect prints about its readings."""

from __future__ import annotations

import pytest

from bumpgate.bisect.answer import so_far
from bumpgate.bisect.search import ProbeOutcome, Search
from tests.support.searching import labels

GOOD, BAD = ProbeOutcome.GOOD, ProbeOutcome.BAD


@pytest.mark.parametrize("find_fix", [False, True])
def test_readings_next_to_the_likeliest_change_are_named(find_fix: bool) -> None:
    names = labels(12)
    ends = (names[9], names[2]) if find_fix else (names[2], names[9])
    early, late = (BAD, GOOD) if find_fix else (GOOD, BAD)
    search = Search(names, *ends, false_bad=0.1, false_good=0.1, find_fix=find_fix)
    assert so_far(search) == ""
    search.record(2, early)
    assert so_far(search) == ""
    search.record(9, late)
    for index, outcome in ((4, early), (7, late), (7, late), (5, early), (5, late), (8, early)):
        search.record(index, outcome)
    between = sum(mass for i, mass in enumerate(search.posterior(), start=2) if 4 < i <= 7)
    assert 0.5 < between < 0.95
    words = f"so far      {names[4]} {early.value}, {names[7]} {late.value}; probability {between:.2f}"
    assert so_far(search) == words


def test_between_two_ends_is_everything() -> None:
    names = labels(5)
    search = Search(names, names[0], names[4], false_bad=0.0, false_good=0.0)
    search.record(0, GOOD)
    search.record(4, BAD)
    assert so_far(search) == f"so far      {names[0]} GOOD, {names[4]} BAD; probability 1.00"
