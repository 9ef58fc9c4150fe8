"""Values measured once per side: what the gate reports as worse, what it displays, and what it measures again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.findings import Decision, Finding, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, RowError, Value, Verdict, read_record
from bumpgate.gate import measure
from bumpgate.gate.compare_rows import ValueChange, change
from bumpgate.gate.remeasure import outside_on_one_side
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed import cost, timed_rows
from bumpgate.gate.verdict import SLOW_IN_BOTH, GateVerdict, Side, judge_gate
from tests.support.gating import TIME_TEST, Machine, count, gone, labels, seconds
from tests.support.tree import ROOT

HOLD, UNKNOWN, ADOPT = Decision.HOLD, Decision.UNKNOWN, Decision.ADOPT
TEST = "suites/throughput/test_a.py::test_a[cpu]"


def row(metric: str, value: Value, unit: str, **fields: object) -> Row:
    made = {"id": f"throughput/nam52/{metric}", "value": value, "unit": unit, "witness": 1, "rule": "C37"}
    return Row(**made | {"test": TEST} | fields)  # type: ignore[arg-type]


def judged(made: Row, **fields: object) -> Judgement:
    return replace(Judgement(made, Verdict.PASS, "", tolerance=made.tolerance), **fields)  # type: ignore[arg-type]


def record(*judgements: Judgement) -> Record:
    return Record({"lane": "cpu"}, judgements)


def findings(
    adopted: Judgement, candidate: Judgement, timed: dict[str, Timed] | None = None
) -> list[tuple[Decision, str]]:
    sides = (Side("torch 2.13.0", record(adopted)), Side("torch 2.14.0", record(candidate)))
    return [(f.decision, f.label) for f in judge_gate("cpu", *sides, timed).findings]


def slower(ratio: float) -> Timed:
    return Timed(TimedOutcome.SLOWER, ratio, (ratio - 0.01, ratio + 0.01), 12, 0.001)


COLD = row("cold_first_step_seconds", 45.0, "s", better="lower", tolerance=0.5)
DEVICE = row("device_milliseconds_per_step", 341.1, "ms", better="lower", tolerance=0.06)


@pytest.mark.parametrize(("reading", "ratio"), [(COLD, 1.49), (DEVICE, 1.115)])
def test_slower_single_reading_is_measured_again(reading: Row, ratio: float) -> None:
    """Both sides pass their stored tolerance, or nearly; the sessions decide, and without them there is no ADOPT."""
    adopted, candidate = judged(reading), judged(replace(reading, value=reading.value * ratio))
    assert timed_rows(record(adopted), record(candidate)) == {reading.id: TEST}
    assert cost(candidate) == candidate.row.value
    assert findings(adopted, candidate) == [(UNKNOWN, "INCONCLUSIVE")]
    assert findings(adopted, candidate, {reading.id: slower(ratio)}) == [(HOLD, "SLOWER")]
    same = Timed(TimedOutcome.SAME, 1.001, (0.98, 1.02), 12, 1.0)
    assert findings(adopted, candidate, {reading.id: same}) == []


@pytest.mark.parametrize("ratio", [1.087, 1.49])
def test_single_reading_outside_its_tolerance_is_measured_again(ratio: float) -> None:
    """However little or much it is worse, one reading does not hold; on the adopted side too it is no difference."""
    adopted, candidate = judged(COLD), judged(replace(COLD, value=45.0 * ratio), verdict=Verdict.REGRESSION)
    assert timed_rows(record(adopted), record(candidate)) == {COLD.id: TEST}
    assert findings(adopted, candidate) == [(UNKNOWN, "INCONCLUSIVE")]
    assert findings(adopted, candidate, {COLD.id: slower(ratio)}) == [(HOLD, "SLOWER")]
    same = Timed(TimedOutcome.SAME, 1.001, (0.98, 1.02), 12, 1.0)
    assert findings(adopted, candidate, {COLD.id: same}) == []


@pytest.mark.parametrize(
    ("before", "after", "tolerance"), [(1.0, 1.02, 0.01), (1.0, 1.5, 0.03), (0.0, 500.0, 0.1)], ids=str
)
def test_reading_that_sessions_cannot_refute_holds(before: float, after: float, tolerance: float) -> None:
    """The sessions call a row SAME within 3.5 %, and compare no value of 0."""
    waste = row("wasted_tokens", before, "ratio", better="lower", tolerance=tolerance)
    candidate = judged(replace(waste, value=after), verdict=Verdict.REGRESSION)
    assert timed_rows(record(judged(waste)), record(candidate)) == {}
    assert findings(judged(waste), candidate) == [(HOLD, "REGRESSION")]


def test_accepted_time_is_not_measured_again() -> None:
    candidate = judged(
        replace(COLD, value=45.0 * 1.6), verdict=Verdict.REGRESSION, accepted="ann, until 2027: why"
    )
    assert timed_rows(record(judged(COLD)), record(candidate)) == {}
    assert {decision for decision, _ in findings(judged(COLD), candidate)} <= {ADOPT}


def test_single_reading_above_a_derived_bound_holds() -> None:
    bounded = replace(COLD, better="derived", tolerance=0.0, at_most=60.0)
    candidate = judged(replace(bounded, value=61.0), verdict=Verdict.REGRESSION)
    assert timed_rows(record(judged(bounded)), record(candidate)) == {}
    assert findings(judged(bounded), candidate) == [(HOLD, "REGRESSION")]


@pytest.mark.parametrize(("reading", "ratio"), [(COLD, 1.31), (DEVICE, 1.024), (COLD, 0.5)])
def test_noise_of_a_single_reading_is_not_a_finding(reading: Row, ratio: float) -> None:
    adopted, candidate = judged(reading), judged(replace(reading, value=reading.value * ratio))
    assert timed_rows(record(adopted), record(candidate)) == {}
    assert findings(adopted, candidate) == []


def moved(metric: str, before: Value, after: Value, unit: str, **fields: object) -> ValueChange | None:
    return change(row(metric, before, unit, **fields), row(metric, after, unit, **fields))


LOWER = {"better": "lower"}
TENTH = {"better": "lower", "tolerance": 0.1}
PAIRED = {"better": "lower", "paired": True}
BOUND = {"better": "derived", "at_most": 3.0}
BUILD = {"per_build": True}
WORSE, BETTER, OTHER, AGAIN, SMALL = (
    ValueChange.WORSE,
    ValueChange.BETTER,
    ValueChange.OTHER,
    ValueChange.AGAIN,
    ValueChange.SMALL,
)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("kernels_per_step", 3311, 3312, "count", LOWER), SMALL),
        (("kernels_per_step", 3312, 3311, "count", LOWER), SMALL),
        (("kernels_per_step", 100, 103, "count", LOWER), WORSE),
        (("kernels_per_step", 103, 100, "count", LOWER), BETTER),
        (("peak_memory_bytes", 5144634880, 5146084864, "bytes", LOWER), SMALL),
        (("peak_memory_bytes", 5144634880, 5200000000, "bytes", LOWER), WORSE),
        (("peak_memory_bytes", 5144634880, 5200000000, "bytes", TENTH), SMALL),
        (("guard_count", 474, 480, "count", LOWER), SMALL),
        (("guard_count", 474, 520, "count", LOWER), WORSE),
        (("guard_count", 474, 520, "count", TENTH), SMALL),
        (("hlo_instructions", 13386, 13400, "count", {}), SMALL),
        (("hlo_instructions", 13386, 13100, "count", {}), OTHER),
        (("host_syncs", 0, 1, "count", LOWER), WORSE),
        (("skips", 200, 210, "graphs", TENTH), SMALL),
        (("skips", 200, 230, "graphs", TENTH), WORSE),
        (("capability", 1, 0, "capability", {"better": "higher"}), WORSE),
        (("compiled_calls", 41, 39, "count", {"better": "derived", "at_least": 39}), WORSE),
        (("gradient_error_ratio", 1.1, 1.9, "ratio", BOUND), None),
        (("gradient_error_ratio", 1.1, 2.9, "ratio", BOUND), WORSE),
        (("gradient_error_ratio", 1.5e-5, 7e-5, "ratio", BOUND), None),
        (("document_leak", 3e-15, 4e-14, "logits", {"better": "derived", "at_most": 1e-10}), None),
        (("loss_fall", 2.25, 2.40, "nats", {"better": "derived", "at_least": 0.2}), None),
        (("loss_fall", 2.25, 1.40, "nats", {"better": "derived", "at_least": 0.2}), WORSE),
        (("margin", -10.0, -9.0, "nats", LOWER), None),
        (("margin", -10.0, -7.0, "nats", LOWER), WORSE),
        (("margin", -10.0, -14.0, "nats", LOWER), BETTER),
        (("first_step_seconds", 1.9, 13.0, "s", {"better": "derived", "at_most": 600}), AGAIN),
        (("speedup_over_eager", 1.38, 1.2, "ratio", {"better": "derived", "at_least": 1.15}), AGAIN),
        (("generated_kernels", 200, 1000, "count", BUILD), WORSE),
        (("generated_kernels", 200, 201, "count", BUILD), OTHER),
        (("generated_kernels", 200, 100, "count", BUILD), BETTER),
        (("works", True, False, "bool", BUILD), WORSE),
        (("works", False, True, "bool", BUILD), OTHER),
        (("code_hash", "3f45", "a1b2", "sha256", BUILD), OTHER),
        (("images", 1000.0, 990.0, "images/s", {"better": "higher", "tolerance": 0.1}), None),
        (("images", 1000.0, 800.0, "images/s", {"better": "higher", "tolerance": 0.1}), AGAIN),
        (("launch", 900, 910, "ns", TENTH), None),
        (("modules", 8, 9, "count", {}), OTHER),
        (("agrees", 13, 14, "count", {"better": "derived", "expected": 13}), None),
        (("ratio", 1.0, 1.5, "ratio", {"better": "lower", "interval": (0.9, 1.6)}), None),
        (("peak_rss_bytes", 500, 900, "bytes", {"better": "lower", "paired": True}), None),
        (("modules", 8, 9, "count", {"paired": True}), OTHER),
    ],
)
def test_change_margin_depends_on_kind_of_row(args: tuple, expected: ValueChange | None) -> None:
    *values, fields = args
    assert moved(*values, **fields) is expected


@pytest.mark.parametrize(
    ("adopted", "candidate", "accepted", "expected"),
    [
        (row("modules", 8, "count"), row("modules", 9, "count"), "", (HOLD, "CHANGED")),
        (row("modules", 8, "count"), row("modules", 9, "count"), "ann, until 2027", (ADOPT, "CHANGED")),
        (row("k", 200, "count", **BUILD), row("k", 1000, "count", **BUILD), "", (HOLD, "WORSE")),
        (row("k", 200, "count", **BUILD), row("k", 201, "count", **BUILD), "", (ADOPT, "CHANGED")),
        (row("k", 200, "count", **LOWER), row("k", 199, "count", **LOWER), "", (ADOPT, "WIN")),
    ],
)
def test_passing_rows_that_differ_are_a_finding(
    adopted: Row, candidate: Row, accepted: str, expected: tuple[Decision, str]
) -> None:
    assert findings(judged(adopted), judged(candidate, accepted=accepted)) == [expected]


@pytest.mark.parametrize(
    ("adopted", "candidate", "words"),
    [
        (row("step", 250.0, "ms", **PAIRED), row("step", 0.3, "s", **PAIRED), "unit 'ms' and 's'"),
        (row("peak", 2, "MiB", paired=True), row("peak", 2, "GiB", paired=True), "unit 'MiB' and 'GiB'"),
        (
            row("rate", 9.0, "x", **PAIRED),
            row("rate", 9.0, "x", better="higher", paired=True),
            "better 'lower' and 'higher'",
        ),
    ],
    ids=["time", "exact", "direction"],
)
def test_values_of_different_kinds_are_not_compared(adopted: Row, candidate: Row, words: str) -> None:
    assert timed_rows(record(judged(adopted)), record(judged(candidate))) == {}
    sides = (Side("torch 2.13.0", record(judged(adopted))), Side("torch 2.14.0", record(judged(candidate))))
    (finding,) = judge_gate("cpu", *sides).findings
    assert (finding.decision, finding.label) == (UNKNOWN, "OTHER KIND")
    assert finding.head == f"{adopted.id}: {words}"


def test_finding_shows_both_values() -> None:
    adopted, candidate = (
        Side(n, record(judged(row("k", v, "count", **LOWER)))) for n, v in (("a", 200), ("b", 210))
    )
    found: Finding = judge_gate("cpu", adopted, candidate).findings[0]
    assert found.adopted == ("throughput/nam52/k: 200 count",)
    assert found.candidate == ("throughput/nam52/k: 210 count",)


def test_paired_row_needs_no_interval() -> None:
    rss = row("peak_rss_bytes", 463 << 20, "bytes", better="lower", paired=True)
    assert Row.from_json(rss.to_json()) == rss
    assert timed_rows(record(judged(rss)), record(judged(rss))) == {rss.id: TEST}
    modules = row("modules", 8, "count", paired=True)
    assert timed_rows(record(judged(modules)), record(judged(modules))) == {}, (
        "an exact value needs no session"
    )
    with pytest.raises(
        RowError, match="better of a paired row must be exact, lower or higher, got 'derived'"
    ):
        row("modules", 8, "count", better="derived", expected=8, paired=True)


def whole(name: str) -> Side:
    found = read_record(ROOT / "baselines" / "records" / f"{name}.json.xz")
    return Side(name, replace(found, provenance=found.provenance | {"lane": "cpu"}))


@pytest.mark.parametrize("swap", [False, True])
def test_one_build_on_two_machines_is_never_worse(swap: bool) -> None:
    """Two complete runs of one build: 634 rows, no margin is exceeded, and few times would be measured again."""
    adopted, candidate = (whole(f"h200-whole-{n}-machine") for n in ("one", "another")[:: -1 if swap else 1])
    assert [f for f in judge_gate("cpu", adopted, candidate).findings if f.label == "WORSE"] == []
    assert adopted.record
    assert candidate.record
    rows = timed_rows(adopted.record, candidate.record)
    again = [r for r in rows if change(*(by_id(s)[r] for s in (adopted, candidate))) is AGAIN]
    assert len(again) <= 2


def by_id(side: Side) -> dict[str, Row]:
    assert side.record
    return {j.row.id: j.row for j in side.record.judgements}


def test_unchanged_pairs_with_noise_are_never_held() -> None:
    """The stored record against copies of itself, with the noise per kind measured between two machines."""
    rng, adopted = random.Random(20261123), whole("h200-whole")
    assert adopted.record
    noise = {"ms": 0.012, "fraction": 0.016, "ratio": 0.026, "s": 0.13, "nats": 0.03, "bytes": 0.0001}

    def noisy(j: Judgement) -> Judgement:
        r = j.row
        if not isinstance(r.value, float) or r.expected is not None or r.interval:
            return j
        return replace(j, row=replace(r, value=r.value * (1 + rng.gauss(0, noise.get(r.unit, 0.0)))))

    for _ in range(100):
        candidate = Side(
            "again", replace(adopted.record, judgements=tuple(map(noisy, adopted.record.judgements)))
        )
        assert [f for f in judge_gate("cpu", adopted, candidate).findings if f.decision is HOLD] == []


@pytest.mark.parametrize("value", [3.0, 1.49])
def test_losses_that_grow_are_worse_and_not_read_again(value: float) -> None:
    """Their growth is a ratio, but not of times. Within its bound of 1.5 the candidate may be 25 % worse."""
    growth = row("loss_growth", 1.0, "ratio", better="derived", at_most=1.5)
    found = replace(growth, value=value)
    verdict = Verdict.REGRESSION if value > 1.5 else Verdict.PASS
    adopted, candidate = judged(growth), replace(judged(found), verdict=verdict)
    assert not outside_on_one_side(record(adopted), record(candidate))
    assert findings(adopted, candidate) == [(HOLD, "REGRESSION" if value > 1.5 else "WORSE")]
    assert findings(adopted, judged(replace(growth, value=1.2))) == []


def test_ratio_of_counts_is_compared_exactly() -> None:
    share = row("operators_regional_over_whole", 0.01, "ratio", better="derived", at_most=0.1)
    assert findings(judged(share), judged(replace(share, value=0.015))) == [(HOLD, "WORSE")]


# A time that misses its limit on both sides of a gate: the machine is slow, unless the candidate is slower.


ROW = "kernels/scan/first_call_seconds"


def late(value: float, verdict: Verdict = Verdict.REGRESSION, **fields: Any) -> Judgement:
    made = {"better": "lower", "tolerance": 0.2, "test": "suites/a.py::test_a"} | fields
    return Judgement(Row(ROW, value, "s", 3, "C37", **made), verdict, "", tolerance=0.2)


def gate_of_readings(
    adopted: Judgement, candidate: Judgement, timed: dict[str, Timed] | None = None
) -> GateVerdict:
    sides = [Side(f"torch {i}", Record({"lane": "cpu"}, (j,))) for i, j in enumerate((adopted, candidate))]
    return judge_gate("cpu", *sides, timed)


def late_labels(result: GateVerdict) -> list[tuple[Decision, str]]:
    return [(f.decision, f.label) for f in result.findings]


BOUNDED = {"better": "derived", "tolerance": 0.0, "at_most": 20.0}


@pytest.mark.parametrize("fields", [{}, BOUNDED], ids=["reviewed", "bound of the test"])
@pytest.mark.parametrize("candidate", [22.6, 23.8, 26.5])
def test_slow_machine_does_not_stop_a_bump(candidate: float, fields: dict[str, Any]) -> None:
    """The readings of an H200 whose host was busy, limit 20 s."""
    found = gate_of_readings(late(23.8, **fields), late(candidate, **fields))
    assert late_labels(found) == [(Decision.ADOPT, SLOW_IN_BOTH)]
    assert "23.8 s" in found.findings[0].adopted[0]


@pytest.mark.parametrize("candidate", [40.0, float("inf"), float("nan")])
def test_much_slower_candidate_is_not_excused(candidate: float) -> None:
    assert gate_of_readings(late(23.8, **BOUNDED), late(candidate, **BOUNDED)).decision is not Decision.ADOPT


@pytest.mark.parametrize(("candidate", "decision"), [(150.0, Decision.ADOPT), (142.0, Decision.UNKNOWN)])
def test_rate_is_compared_in_its_own_direction(candidate: float, decision: Decision) -> None:
    rates = [
        Judgement(replace(j.row, unit="tokens/s", better="higher"), Verdict.REGRESSION, "", tolerance=0.2)
        for j in (late(150.0), late(candidate))
    ]
    assert gate_of_readings(*rates).decision is decision


@pytest.mark.parametrize("metric", ["loss_growth", "warm_over_cold"])
def test_ratio_is_not_excused_by_a_slow_machine(metric: str) -> None:
    """A loss that explodes on both sides, a cache that neither side reads."""
    row = Row(f"throughput/a/{metric}", 334.0, "ratio", 3, "C33", better="derived", at_most=1.5)
    both = Judgement(row, Verdict.REGRESSION, "")
    assert late_labels(gate_of_readings(both, both)) == [(Decision.UNKNOWN, "RED IN BOTH")]


def test_count_that_is_red_in_both_stays_unknown() -> None:
    fields = {"better": "derived", "tolerance": 0.0, "at_most": 3}
    counts = [
        Judgement(Row("compile/a/breaks", 4, "breaks", 3, "C6", **fields), Verdict.REGRESSION, "")
        for _ in range(2)
    ]
    assert late_labels(gate_of_readings(*counts)) == [(Decision.UNKNOWN, "RED IN BOTH")]


def test_right_adopted_side_still_holds() -> None:
    found = gate_of_readings(late(19.0, Verdict.PASS, **BOUNDED), late(21.0, **BOUNDED))
    assert late_labels(found) == [(Decision.HOLD, "REGRESSION")]


@pytest.mark.parametrize(
    ("outcome", "decision"), [(TimedOutcome.SAME, Decision.ADOPT), (TimedOutcome.SLOWER, Decision.HOLD)]
)
def test_sessions_decide_a_paired_time(outcome: TimedOutcome, decision: Decision) -> None:
    fields = BOUNDED | {"paired": True, "better": "lower"}
    timed = {ROW: Timed(outcome, 1.2, (1.1, 1.3), 16, 1.0)}
    assert gate_of_readings(late(23.8, **fields), late(60.0, **fields), timed).decision is decision


# Tests that the machine disturbed: they are run again, then left to the sessions, and are never evidence of a loss.


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
    same = {slow.row.id: Timed(TimedOutcome.SAME, 1.0, (0.99, 1.01), 12, 0.001)}
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
