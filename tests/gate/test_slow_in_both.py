"""A time that misses its limit on both sides of a gate: the machine is slow, unless the candidate is slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.sequential import Timed
from bumpgate.gate.verdict import SLOW_IN_BOTH, GateVerdict, Side, judge_gate

ROW = "kernels/scan/first_call_seconds"


def late(value: float, verdict: Verdict = Verdict.REGRESSION, **fields: Any) -> Judgement:
    made = {"better": "lower", "tolerance": 0.2, "test": "suites/a.py::test_a"} | fields
    return Judgement(Row(ROW, value, "s", 3, "C37", **made), verdict, "", tolerance=0.2)


def gate(adopted: Judgement, candidate: Judgement, timed: dict[str, Timed] | None = None) -> GateVerdict:
    sides = [Side(f"torch {i}", Record({"lane": "cpu"}, (j,))) for i, j in enumerate((adopted, candidate))]
    return judge_gate("cpu", *sides, timed)


def labels(result: GateVerdict) -> list[tuple[Decision, str]]:
    return [(f.decision, f.label) for f in result.findings]


BOUNDED = {"better": "derived", "tolerance": 0.0, "at_most": 20.0}


@pytest.mark.parametrize("fields", [{}, BOUNDED], ids=["reviewed", "bound of the test"])
@pytest.mark.parametrize("candidate", [22.6, 23.8, 26.5])
def test_slow_machine_does_not_stop_a_bump(candidate: float, fields: dict[str, Any]) -> None:
    """The readings of an H200 whose host was busy, limit 20 s."""
    found = gate(late(23.8, **fields), late(candidate, **fields))
    assert labels(found) == [(Decision.ADOPT, SLOW_IN_BOTH)]
    assert "23.8 s" in found.findings[0].adopted[0]


@pytest.mark.parametrize("candidate", [40.0, float("inf"), float("nan")])
def test_much_slower_candidate_is_not_excused(candidate: float) -> None:
    assert gate(late(23.8, **BOUNDED), late(candidate, **BOUNDED)).decision is not Decision.ADOPT


@pytest.mark.parametrize(("candidate", "decision"), [(150.0, Decision.ADOPT), (142.0, Decision.UNKNOWN)])
def test_rate_is_compared_in_its_own_direction(candidate: float, decision: Decision) -> None:
    rates = [
        Judgement(replace(j.row, unit="tokens/s", better="higher"), Verdict.REGRESSION, "", tolerance=0.2)
        for j in (late(150.0), late(candidate))
    ]
    assert gate(*rates).decision is decision


@pytest.mark.parametrize("metric", ["loss_growth", "warm_over_cold"])
def test_ratio_is_not_excused_by_a_slow_machine(metric: str) -> None:
    """A loss that explodes on both sides, a cache that neither side reads."""
    row = Row(f"throughput/a/{metric}", 334.0, "ratio", 3, "C33", better="derived", at_most=1.5)
    both = Judgement(row, Verdict.REGRESSION, "")
    assert labels(gate(both, both)) == [(Decision.UNKNOWN, "RED IN BOTH")]


def test_count_that_is_red_in_both_stays_unknown() -> None:
    fields = {"better": "derived", "tolerance": 0.0, "at_most": 3}
    counts = [
        Judgement(Row("compile/a/breaks", 4, "breaks", 3, "C6", **fields), Verdict.REGRESSION, "")
        for _ in range(2)
    ]
    assert labels(gate(*counts)) == [(Decision.UNKNOWN, "RED IN BOTH")]


def test_right_adopted_side_still_holds() -> None:
    found = gate(late(19.0, Verdict.PASS, **BOUNDED), late(21.0, **BOUNDED))
    assert labels(found) == [(Decision.HOLD, "REGRESSION")]


@pytest.mark.parametrize(
    ("outcome", "decision"), [(TimedOutcome.SAME, Decision.ADOPT), (TimedOutcome.SLOWER, Decision.HOLD)]
)
def test_sessions_decide_a_paired_time(outcome: TimedOutcome, decision: Decision) -> None:
    fields = BOUNDED | {"paired": True, "better": "lower"}
    timed = {ROW: Timed(outcome, 1.0, (0.99, 1.01), 16, 1.0, 1.0)}
    assert gate(late(23.8, **fields), late(60.0, **fields), timed).decision is decision
