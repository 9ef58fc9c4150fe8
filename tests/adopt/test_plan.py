"""Which rows of a candidate's record an adoption writes into the baseline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.adopt.plan import moved_baseline
from bumpgate.core.baseline import Baseline, Reviewed, judge
from bumpgate.core.rows import Record, Row

TEST = "suites/throughput/test_a.py::test_a[cpu]"
ID = "throughput/nam52/seconds"
OLD = Baseline("cpu", {"torch": "2.13.0", "triton": None}, {ID: Reviewed(1.0, "s", "lower", 0.1, test=TEST)})


def adopted(
    value: float, interval: tuple[float, float] | None, outcome: str | None, fastest: float = 1.02
) -> tuple[Any, Any, Any]:
    """Return the new baseline's value, the changes and the rows that stay red, of one timed row.

    outcome: of the paired sessions; None without any. fastest: upper end of their interval.
    """
    row = Row(ID, value, "s", 3, "C37", better="lower", interval=interval, tolerance=0.1, test=TEST)
    record = Record(
        {"lane": "cpu", "torch": "2.14.0", "triton": None}, (judge(row, OLD, failed_instruments={}),)
    )
    timed = {ID: SimpleNamespace(outcome=outcome, interval=(0.4, fastest))} if outcome else {}
    gate: Any = SimpleNamespace(bad=SimpleNamespace(record=record), timed=timed)
    new, changes, left = moved_baseline(gate, OLD, ())
    return new.rows[ID].value, [change.why for change in changes], left


@pytest.mark.parametrize(
    ("value", "interval", "outcome", "expected"),
    [
        (
            1.5,
            (1.45, 1.55),
            "SAME",
            (1.5, ["regression"], []),
        ),
        (1.5, (1.45, 1.55), "SLOWER", (1.0, [], [ID])),
        (1.5, (1.45, 1.55), None, (1.0, [], [ID])),
        (1.5, None, "NOT SLOWER", (1.0, [], [])),
        (1.5, None, None, (1.0, [], [ID])),
        (0.5, (0.45, 0.55), None, (0.5, ["win"], [])),
        (1.05, (1.0, 1.08), "SAME", (1.0, [], [])),
    ],
)
def test_times_move_if_the_sessions_found_them_no_slower(
    value: float, interval: tuple[float, float] | None, outcome: str | None, expected: tuple[Any, Any, Any]
) -> None:
    """An interval is a value of this build; a single reading that the sessions refute is not."""
    assert adopted(value, interval, outcome) == expected


@pytest.mark.parametrize(
    ("outcome", "fastest", "expected"),
    [
        ("FASTER", 0.6, (0.5, ["win"], [])),
        ("NOT SLOWER", 0.99, (0.5, ["win"], [])),
        ("NOT SLOWER", 1.0, (1.0, [], [])),
        ("SAME", 1.02, (1.0, [], [])),
    ],
)
def test_win_moves_a_time_if_the_sessions_confirm_it(
    outcome: str, fastest: float, expected: tuple[Any, Any, Any]
) -> None:
    """Seen on an H200: tokens/s of a small model read 42 % higher once, and +4 % in [-25 %, +56 %] by sessions."""
    assert adopted(0.5, (0.45, 0.55), outcome, fastest) == expected
