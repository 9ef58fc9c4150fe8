"""A ratio to another implementation that becomes faster does not hold a candidate; the own time does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bumpgate.core.findings import PEER, Decision
from bumpgate.core.rows import Judgement, Record, Row, RowError, Verdict
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import GateVerdict, Side, judge_gate

OWN, RATIO = "kernels/scan/milliseconds", "kernels/scan/over_peer"
TEST = "suites/kernels/test_speed.py::test_speed[cpu]"


def ratio(value: float, verdict: Verdict = Verdict.PASS, **fields: Any) -> Judgement:
    made = {"better": "lower", "tolerance": 0.1, "test": TEST, "own": OWN} | fields
    return Judgement(Row(RATIO, value, "ratio", 3, "C37", **made), verdict, "", tolerance=0.1)


def own(value: float = 2.0, verdict: Verdict = Verdict.PASS) -> Judgement:
    row = Row(OWN, value, "ms", 3, "C37", better="lower", tolerance=0.1, interval=(value, value), test=TEST)
    return Judgement(row, verdict, "")


def records(adopted: list[Judgement], candidate: list[Judgement]) -> tuple[Record, Record]:
    return Record({"lane": "cpu"}, tuple(adopted)), Record({"lane": "cpu"}, tuple(candidate))


def gate(adopted: list[Judgement], candidate: list[Judgement]) -> GateVerdict:
    sides = (Side(name, record) for name, record in zip(("torch 1", "torch 2"), records(adopted, candidate)))
    return judge_gate("cpu", *sides)


def labels(result: GateVerdict) -> list[tuple[Decision, str, tuple[str, ...]]]:
    return [(f.decision, f.label, f.rows) for f in result.findings]


WORSE = pytest.mark.parametrize(
    "worse", [ratio(1.5, Verdict.REGRESSION), ratio(1.2)], ids=["than reviewed", "than the adopted side"]
)


@WORSE
def test_faster_peer_is_shown_and_holds_nothing(worse: Judgement) -> None:
    adopted, candidate = [own(), ratio(1.0)], [own(), worse]
    assert labels(gate(adopted, candidate)) == [(Decision.ADOPT, PEER, (RATIO,))]
    assert timed_rows(*records(adopted, candidate)) == {OWN: TEST}, "sessions measure the own time alone"


@WORSE
def test_ratio_alone_judges_without_the_own_time(worse: Judgement) -> None:
    """Of a side that does not report it, or if the row does not name it."""
    named = labels(gate([own(), ratio(1.0)], [worse]))
    assert (Decision.ADOPT, PEER, (RATIO,)) not in named
    bare = [replace(j, row=replace(j.row, own="")) for j in (ratio(1.0), worse)]
    assert gate([own(), bare[0]], [own(), bare[1]]).decision is not Decision.ADOPT


def test_own_row_that_is_no_time_excuses_nothing() -> None:
    """A count or a time without a direction judges no candidate."""
    for changes in (
        {"unit": "kernels", "interval": None},
        {"better": "exact", "tolerance": 0.0, "interval": None},
    ):
        other = replace(own(), row=replace(own().row, **changes))
        assert gate([other, ratio(1.0)], [other, ratio(1.5, Verdict.REGRESSION)]).decision is Decision.HOLD


def test_slower_own_time_still_holds() -> None:
    found = gate([own(), ratio(1.0)], [own(3.0, Verdict.REGRESSION), ratio(1.5, Verdict.REGRESSION)])
    assert (Decision.HOLD, "REGRESSION", (OWN,)) in labels(found)


@pytest.mark.parametrize(
    "broken",
    [ratio(float("nan"), Verdict.REGRESSION), ratio(1.5, Verdict.REGRESSION, at_most=1.0)],
    ids=["NaN", "beyond a derived bound"],
)
def test_no_number_and_a_bound_still_hold(broken: Judgement) -> None:
    assert gate([own(), ratio(1.0)], [own(), broken]).decision is not Decision.ADOPT


def test_better_ratio_and_equal_ratio_are_no_peers() -> None:
    assert labels(gate([own(), ratio(1.0)], [own(), ratio(1.04)])) == []
    assert labels(gate([own(), ratio(1.0)], [own(), ratio(0.5, Verdict.WIN)])) == [
        (Decision.ADOPT, "WIN", (RATIO,))
    ]


@pytest.mark.parametrize("fields", [{"own": RATIO}, {"own": "no id"}])
def test_own_names_another_row(fields: dict[str, str]) -> None:
    with pytest.raises(RowError, match="own must be the id of another row"):
        ratio(1.0, **fields)


def test_own_is_kept_in_a_record() -> None:
    made = ratio(1.0).row
    assert Row.from_json(made.to_json()) == made
    assert "own" not in own().row.to_json()
