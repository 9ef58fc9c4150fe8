"""What a bisect prints while it runs, and if it is interrupted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bumpgate.bisect.answer import Watcher, so_far
from bumpgate.bisect.probe import Cause, ProbeResult, Reading
from bumpgate.bisect.search import ProbeOutcome, Search
from tests.support.bisects import labels

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


def test_watcher_reports_progress_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Watcher(console) as watcher:
        watcher.probing("torch 2.1.0")
        watcher.probed(
            "torch 2.1.0",
            Reading(Path(), Cause.RAN, 1, seconds=2.5),
            ProbeResult(ProbeOutcome.BAD, "exit [1]"),
            "x",
        )
    assert "\x1b[" in out.getvalue()
    assert "torch 2.1.0 in 2.5 s: exit [1]; x" in out.getvalue()
    assert watcher.seconds == 2.5
    plain = io.StringIO()
    with Watcher(Console(file=plain, width=40)) as watcher:
        watcher.probed(
            "torch 2.1.0", Reading(Path(), Cause.RAN, 1), ProbeResult(ProbeOutcome.GOOD, "z" * 90), ""
        )
    assert plain.getvalue() == f"GOOD    torch 2.1.0 in 0.0 s: {'z' * 90}\n"
