"""Tests that the machine disturbed: they are run again, then left to the sessions, and are never evidence of a loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, Verdict, read_record
from bumpgate.gate import measure
from bumpgate.gate.sequential import Timed
from bumpgate.gate.verdict import Side, judge_gate
from tests.support.gating import TIME_TEST, Machine, count, gone, labels, seconds

UNREVIEWED = pytest.mark.parametrize("unreviewed", [False, True])


@UNREVIEWED
def test_disturbed_test_is_run_once_more(machine: Machine, out: Path, unreviewed: bool) -> None:
    machine.sides["candidate"].spoiled, machine.sides["candidate"].unreviewed = 1, unreviewed
    gate = machine.gate(out)
    assert gate.decision is Decision.ADOPT, gate.findings
    assert f"{TIME_TEST}:candidate" in machine.processes
    ids = [j.row.id for j in read_record(out / "candidate.json").judgements]
    assert ids == ["compile/a/graph_breaks", "throughput/b/seconds"]


@UNREVIEWED
@pytest.mark.parametrize("sides", [("adopted",), ("candidate",), ("adopted", "candidate")])
def test_twice_disturbed_test_is_judged_by_the_sessions(
    machine: Machine, out: Path, sides: tuple[str, ...], unreviewed: bool
) -> None:
    for side in sides:
        machine.sides[side].spoiled, machine.sides[side].unreviewed = 2, unreviewed
    gate = machine.gate(out)
    if unreviewed and len(sides) == 2:  # no side knows the rows of this test
        assert labels(gate) == [("UNKNOWN", "INFRA")]
        return
    assert (gate.decision, list(gate.timed)) == (Decision.ADOPT, ["throughput/b/seconds"]), gate.findings


@pytest.mark.parametrize("unit", ["breaks", "bytes"])
def test_twice_disturbed_count_is_not_paired(machine: Machine, out: Path, unit: str) -> None:
    """Sessions would allow it to be 3 % worse. Its test is disturbed on both sides, so nothing is known of it."""
    row = Row("throughput/b/peak", None, unit, 0, "", better="lower", test=TIME_TEST)
    lost = Judgement(row, Verdict.INFRA, "not quiet")
    for side in (machine.sides["adopted"], machine.sides["candidate"]):
        side.counts, side.second = [count(), lost], [lost, gone(Verdict.INFRA, "not quiet", TIME_TEST)]
        side.spoiled = 1
    gate = machine.gate(out)
    assert list(gate.timed) == ["throughput/b/seconds"]
    assert (gate.decision, labels(gate)) == (Decision.UNKNOWN, [("UNKNOWN", "INFRA")])


def test_violated_bound_counts_next_to_a_disturbed_side() -> None:
    """The sessions compare the two sides, and not a side with the bound that its test derives."""
    slow = Judgement(replace(seconds(2.0).row, at_most=1.5), Verdict.REGRESSION, "expected at most 1.5")
    lost = gone(Verdict.INFRA, "not quiet", TIME_TEST)
    adopted, candidate = (
        Side(name, Record({"lane": "cpu"}, (j,))) for name, j in (("adopted", lost), ("candidate", slow))
    )
    same = {slow.row.id: Timed(TimedOutcome.SAME, 1.0, (0.99, 1.01), 12, 0.001, 0.001)}
    assert judge_gate("cpu", adopted, candidate, same).decision is Decision.UNKNOWN


@UNREVIEWED
def test_disturbed_session_is_replaced_by_another(machine: Machine, out: Path, unreviewed: bool) -> None:
    made = machine.prepare(out)
    made.enter()
    for name in ("adopted", "candidate"):
        made.gate = measure.measure(made.bench, made.gate.changed(name, canaries={}), [name])
    machine.sides["adopted"].spoiled, machine.sides["adopted"].unreviewed = 1, unreviewed
    made.run()
    sessions = made.gate.paired
    assert sessions
    assert sessions.started == len(sessions.log_ratios["throughput/b/seconds"]) + 1
    reason = "not quiet" if unreviewed else "throughput/b/seconds: not quiet"
    assert f"last lost: adopted: {reason}" in (out / "output.txt").read_text()
    assert made.gate.decision is Decision.ADOPT
