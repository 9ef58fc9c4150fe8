"""Values measured once per side: what the gate reports as worse, what it displays, and what it measures again."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, RowError, Value, Verdict, read_record
from bumpgate.gate import measure
from bumpgate.gate.compare_rows import ValueChange, change
from bumpgate.gate.remeasure import outside_on_one_side
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed import cost, timed_rows
from bumpgate.gate.verdict import SLOW_IN_BOTH, GateVerdict, Side, judge_gate
from tests.support.gating import TIME_ROW, TIME_TEST, Machine, count, gone, labels, seconds
from tests.support.tree import ROOT

HOLD, UNKNOWN, ADOPT = Decision.HOLD, Decision.UNKNOWN, Decision.ADOPT
RED = Verdict.REGRESSION
TEST = "suites/throughput/test_a.py::test_a[cpu]"


def row(metric: str, value: Value, unit: str, **fields: object) -> Row:
    made = {"id": f"throughput/nam52/{metric}", "value": value, "unit": unit, "witness": 1, "rule": "C37"}
    return Row(**made | {"test": TEST} | fields)  # type: ignore[arg-type]


def judged(made: Row, value: Value | None = None, how: Verdict = Verdict.PASS, **fields: Any) -> Judgement:
    """Judge a row, with another value if there is one."""
    made = made if value is None else replace(made, value=value)
    return Judgement(made, how, "", tolerance=made.tolerance, **fields)


def record(*judgements: Judgement) -> Record:
    return Record({"lane": "cpu"}, judgements)


def gate(adopted: Judgement, candidate: Judgement, timed: dict[str, Timed] | None = None) -> GateVerdict:
    sides = Side("torch 2.13.0", record(adopted)), Side("torch 2.14.0", record(candidate))
    return judge_gate("cpu", *sides, timed)


def findings(
    adopted: Judgement, candidate: Judgement, timed: dict[str, Timed] | None = None
) -> list[tuple[Decision, str]]:
    return [(f.decision, f.label) for f in gate(adopted, candidate, timed).findings]


def paired(adopted: Judgement, candidate: Judgement) -> dict[str, str]:
    return timed_rows(record(adopted), record(candidate))


COLD = row("cold_first_step_seconds", 45.0, "s", better="lower", tolerance=0.5)
DEVICE = row("device_milliseconds_per_step", 341.1, "ms", better="lower", tolerance=0.06)


@pytest.mark.parametrize(
    ("reading", "ratio", "how"),
    [(COLD, 1.49, Verdict.PASS), (DEVICE, 1.115, Verdict.PASS), (COLD, 1.087, RED), (COLD, 1.49, RED)],
)
def test_slower_single_reading_is_measured_again(reading: Row, ratio: float, how: Verdict) -> None:
    """Within its tolerance or outside, one reading does not hold; without sessions there is no ADOPT."""
    adopted, candidate = judged(reading), judged(reading, reading.value * ratio, how)
    assert paired(adopted, candidate) == {reading.id: TEST}
    assert cost(candidate) == candidate.row.value
    assert findings(adopted, candidate) == [(UNKNOWN, "INCONCLUSIVE")]
    slower = Timed(TimedOutcome.SLOWER, ratio, (ratio - 0.01, ratio + 0.01), 12, 0.001)
    assert findings(adopted, candidate, {reading.id: slower}) == [(HOLD, "SLOWER")]
    same = Timed(TimedOutcome.SAME, 1.001, (0.98, 1.02), 12, 1.0)
    assert findings(adopted, candidate, {reading.id: same}) == []


def waste(value: float, tolerance: float) -> Row:
    return row("wasted_tokens", value, "ratio", better="lower", tolerance=tolerance)


BOUND_60 = replace(COLD, better="derived", tolerance=0.0, at_most=60.0)
# Readings that no session measures again.
READ_ONCE = {
    "noise of seconds": (judged(COLD), judged(COLD, 45.0 * 1.31), []),
    "noise of milliseconds": (judged(DEVICE), judged(DEVICE, 341.1 * 1.024), []),
    "faster": (judged(COLD), judged(COLD, 22.5), []),
    "accepted": (judged(COLD), judged(COLD, 72.0, RED, accepted="ann, until 2027: why"), None),
    "above a derived bound": (judged(BOUND_60), judged(BOUND_60, 61.0, RED), [(HOLD, "REGRESSION")]),
    # The sessions call a row SAME within 3.5 %, and compare no value of 0.
    "tolerance of 1 %": (
        judged(waste(1.0, 0.01)),
        judged(waste(1.02, 0.01), how=RED),
        [(HOLD, "REGRESSION")],
    ),
    "tolerance of 3 %": (judged(waste(1.0, 0.03)), judged(waste(1.5, 0.03), how=RED), [(HOLD, "REGRESSION")]),
    "zero": (judged(waste(0.0, 0.1)), judged(waste(500.0, 0.1), how=RED), [(HOLD, "REGRESSION")]),
}


@pytest.mark.parametrize("name", READ_ONCE)
def test_reading_that_is_judged_alone(name: str) -> None:
    adopted, candidate, expected = READ_ONCE[name]
    assert paired(adopted, candidate) == {}
    if expected is None:
        assert {decision for decision, _ in findings(adopted, candidate)} <= {ADOPT}
    else:
        assert findings(adopted, candidate) == expected


LOWER = {"better": "lower"}
TENTH = {"better": "lower", "tolerance": 0.1}
PAIRED = {"better": "lower", "paired": True}
BOUND = {"better": "derived", "at_most": 3.0}
FALL = {"better": "derived", "at_least": 0.2}
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
        (("operators_regional_over_whole", 0.01, 0.015, "ratio", BOUND), WORSE),
        (("gradient_error_ratio", 1.1, 1.9, "ratio", BOUND), None),
        (("gradient_error_ratio", 1.1, 2.9, "ratio", BOUND), WORSE),
        (("gradient_error_ratio", 1.5e-5, 7e-5, "ratio", BOUND), None),
        (("document_leak", 3e-15, 4e-14, "logits", {"better": "derived", "at_most": 1e-10}), None),
        (("loss_fall", 2.25, 2.40, "nats", FALL), None),
        (("loss_fall", 2.25, 1.40, "nats", FALL), WORSE),
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
        (("works", True, False, "bool", {}), OTHER),
        (("code_hash", "3f45", "a1b2", "sha256", BUILD), OTHER),
        (("images", 1000.0, 990.0, "images/s", {"better": "higher", "tolerance": 0.1}), None),
        (("images", 1000.0, 800.0, "images/s", {"better": "higher", "tolerance": 0.1}), AGAIN),
        (("launch", 900, 910, "ns", TENTH), None),
        (("modules", 8, 9, "count", {}), OTHER),
        (("agrees", 13, 14, "count", {"better": "derived", "expected": 13}), None),
        (("ratio", 1.0, 1.5, "ratio", {"better": "lower", "interval": (0.9, 1.6)}), None),
        (("peak_rss_bytes", 500, 900, "bytes", PAIRED), None),
        (("modules", 8, 9, "count", {"paired": True}), OTHER),
    ],
)
def test_change_margin_depends_on_kind_of_row(args: tuple, expected: ValueChange | None) -> None:
    metric, before, after, unit, fields = args
    assert change(row(metric, before, unit, **fields), row(metric, after, unit, **fields)) is expected


@pytest.mark.parametrize(
    ("before", "after", "fields", "accepted", "expected"),
    [
        (8, 9, {}, "", (HOLD, "CHANGED")),
        (8, 9, {}, "ann, until 2027", (ADOPT, "CHANGED")),
        (200, 1000, BUILD, "", (HOLD, "WORSE")),
        (200, 201, BUILD, "", (ADOPT, "CHANGED")),
        (200, 199, LOWER, "", (ADOPT, "WIN")),
        (200, 210, LOWER, "", (HOLD, "WORSE")),
    ],
)
def test_passing_rows_that_differ_are_a_finding(
    before: int, after: int, fields: dict[str, object], accepted: str, expected: tuple[Decision, str]
) -> None:
    made = row("k", before, "count", **fields)
    (found,) = gate(judged(made), judged(made, after, accepted=accepted)).findings
    assert (found.decision, found.label) == expected
    assert found.adopted == (f"throughput/nam52/k: {before} count",)
    assert found.candidate == (f"throughput/nam52/k: {after} count",)


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
    assert paired(judged(adopted), judged(candidate)) == {}
    (finding,) = gate(judged(adopted), judged(candidate)).findings
    assert (finding.decision, finding.label) == (UNKNOWN, "OTHER KIND")
    assert finding.head == f"{adopted.id}: {words}"


def test_paired_row_needs_no_interval() -> None:
    rss = row("peak_rss_bytes", 463 << 20, "bytes", better="lower", paired=True)
    assert Row.from_json(rss.to_json()) == rss
    assert paired(judged(rss), judged(rss)) == {rss.id: TEST}
    modules = judged(row("modules", 8, "count", paired=True))
    assert paired(modules, modules) == {}, "an exact value needs no session"
    words = "better of a paired row must be exact, lower or higher, got 'derived'"
    with pytest.raises(RowError, match=words):
        row("modules", 8, "count", better="derived", expected=8, paired=True)


def whole(name: str) -> Record:
    found = read_record(ROOT / "baselines" / "records" / f"{name}.json.xz")
    return replace(found, provenance=found.provenance | {"lane": "cpu"})


@pytest.mark.parametrize("swap", [False, True])
def test_one_build_on_two_machines_is_never_worse(swap: bool) -> None:
    """Two complete runs of one build: 634 rows, no margin is exceeded, and few times would be measured again."""
    records = [whole(f"h200-whole-{n}-machine") for n in ("one", "another")][:: -1 if swap else 1]
    found = judge_gate("cpu", *(Side("torch", record) for record in records)).findings
    assert [f for f in found if f.label == "WORSE"] == []
    adopted, candidate = ({j.row.id: j.row for j in record.judgements} for record in records)
    again = [r for r in timed_rows(*records) if change(adopted[r], candidate[r]) is AGAIN]
    assert len(again) <= 2


def test_unchanged_pairs_with_noise_are_never_held() -> None:
    """The stored record against copies of itself, with the noise per kind measured between two machines."""
    rng, adopted = random.Random(20261123), whole("h200-whole")
    noise = {"ms": 0.012, "fraction": 0.016, "ratio": 0.026, "s": 0.13, "nats": 0.03, "bytes": 0.0001}

    def noisy(j: Judgement) -> Judgement:
        r = j.row
        if not isinstance(r.value, float) or r.expected is not None or r.interval:
            return j
        return replace(j, row=replace(r, value=r.value * (1 + rng.gauss(0, noise.get(r.unit, 0.0)))))

    for _ in range(100):
        candidate = replace(adopted, judgements=tuple(map(noisy, adopted.judgements)))
        found = judge_gate("cpu", Side("torch", adopted), Side("again", candidate)).findings
        assert [f for f in found if f.decision is HOLD] == []


@pytest.mark.parametrize(
    ("value", "expected"), [(3.0, [(HOLD, "REGRESSION")]), (1.49, [(HOLD, "WORSE")]), (1.2, [])]
)
def test_losses_that_grow_are_worse_and_not_read_again(
    value: float, expected: list[tuple[Decision, str]]
) -> None:
    """Their growth is a ratio, but not of times. Within its bound of 1.5 the candidate may be 25 % worse."""
    growth = row("loss_growth", 1.0, "ratio", better="derived", at_most=1.5)
    adopted, candidate = judged(growth), judged(growth, value, RED if value > 1.5 else Verdict.PASS)
    assert not outside_on_one_side(record(adopted), record(candidate))
    assert findings(adopted, candidate) == expected


# A time that misses its limit on both sides of a gate: the machine is slow, unless the candidate is slower.


ROW = "kernels/scan/first_call_seconds"
REVIEWED = {"better": "lower", "tolerance": 0.2}
BOUNDED = {"better": "derived", "at_most": 20.0}
RATE = REVIEWED | {"unit": "tokens/s", "better": "higher"}
RATIO = {"unit": "ratio", "better": "derived", "at_most": 1.5}
SHARE = {"unit": "fraction", "better": "derived", "at_least": 0.3, "id": "kernels/scan/share_of_roofline"}
BREAKS = {"unit": "breaks", "better": "derived", "at_most": 3, "id": "compile/a/breaks"}


def late(value: float, how: Verdict = RED, **fields: Any) -> Judgement:
    return judged(row("", value, **{"unit": "s", "id": ROW} | fields), how=how)


BOTH_RED = {
    # The readings of an H200 whose host was busy, limit 20 s.
    **{f"reviewed, {x}": (late(23.8, **REVIEWED), late(x, **REVIEWED), "ADOPT") for x in (22.6, 23.8, 26.5)},
    **{f"bound, {x}": (late(23.8, **BOUNDED), late(x, **BOUNDED), "ADOPT") for x in (22.6, 23.8, 26.5)},
    "much slower": (late(23.8, **BOUNDED), late(40.0, **BOUNDED), "UNKNOWN"),
    "infinite": (late(23.8, **BOUNDED), late(math.inf, **BOUNDED), "UNKNOWN"),
    "NaN": (late(23.8, **BOUNDED), late(math.nan, **BOUNDED), "UNKNOWN"),
    "same rate": (late(150.0, **RATE), late(150.0, **RATE), "ADOPT"),
    "lower rate": (late(150.0, **RATE), late(142.0, **RATE), "UNKNOWN"),
    # A loss that explodes on both sides, a cache that neither side reads.
    "losses": (late(334.0, id="a/b/loss_growth", **RATIO), late(334.0, id="a/b/loss_growth", **RATIO), "UNKNOWN"),
    "cache": (late(334.0, id="a/b/warm_over_cold", **RATIO), late(334.0, id="a/b/warm_over_cold", **RATIO), "UNKNOWN"),
    "share of a roofline": (late(0.1, **SHARE), late(0.1, **SHARE), "UNKNOWN"),
    "count": (late(4, **BREAKS), late(4, **BREAKS), "UNKNOWN"),
    "right adopted side": (late(19.0, Verdict.PASS, **BOUNDED), late(21.0, **BOUNDED), "HOLD"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH_RED)
def test_slow_machine_does_not_stop_a_bump(name: str) -> None:
    adopted, candidate, decision = BOTH_RED[name]
    (found,) = gate(adopted, candidate).findings
    assert found.decision.name == decision
    if decision == "ADOPT":
        assert found.label == SLOW_IN_BOTH
        assert f"{adopted.row.value:g} {adopted.row.unit}" in found.adopted[0]
    if name in ("losses", "cache", "share of a roofline", "count"):
        assert found.label == "RED IN BOTH"


@pytest.mark.parametrize(("outcome", "decision"), [(TimedOutcome.SAME, ADOPT), (TimedOutcome.SLOWER, HOLD)])
def test_sessions_decide_a_paired_time(outcome: TimedOutcome, decision: Decision) -> None:
    fields = BOUNDED | {"paired": True, "better": "lower"}
    timed = {ROW: Timed(outcome, 1.2, (1.1, 1.3), 16, 1.0)}
    assert gate(late(23.8, **fields), late(60.0, **fields), timed).decision is decision


# Tests that the machine disturbed: they are run again, then left to the sessions, and are never evidence of a loss.


UNREVIEWED = pytest.mark.parametrize("unreviewed", [False, True])


@UNREVIEWED
def test_disturbed_test_is_run_once_more(machine: Machine, out: Path, unreviewed: bool) -> None:
    machine.plant("candidate", spoiled=1, unreviewed=unreviewed)
    gate = machine.gate(out)
    assert gate.decision is ADOPT, gate.findings
    assert f"{TIME_TEST}:candidate" in machine.processes
    ids = [j.row.id for j in read_record(out / "candidate.json").judgements]
    assert ids == ["compile/a/graph_breaks", TIME_ROW]


@UNREVIEWED
@pytest.mark.parametrize("sides", ["adopted", "candidate", "adopted candidate"])
def test_twice_disturbed_test_is_judged_by_the_sessions(
    machine: Machine, out: Path, sides: str, unreviewed: bool
) -> None:
    machine.plant(*sides.split(), spoiled=2, unreviewed=unreviewed)
    gate = machine.gate(out)
    if unreviewed and " " in sides:  # no side knows the rows of this test
        assert labels(gate) == [("UNKNOWN", "INFRA")]
        return
    assert (gate.decision, list(gate.timed)) == (ADOPT, [TIME_ROW]), gate.findings


@pytest.mark.parametrize("unit", ["breaks", "bytes"])
def test_twice_disturbed_count_is_not_paired(machine: Machine, out: Path, unit: str) -> None:
    """Sessions would allow it to be 3 % worse. Its test is disturbed on both sides, so nothing is known of it."""
    made = Row("throughput/b/peak", None, unit, 0, "", better="lower", test=TIME_TEST)
    lost = Judgement(made, Verdict.INFRA, "not quiet")
    second = [lost, gone(Verdict.INFRA, "not quiet", TIME_TEST)]
    machine.plant("adopted", "candidate", counts=[count(), lost], second=second, spoiled=1)
    gate = machine.gate(out)
    assert list(gate.timed) == [TIME_ROW]
    assert (gate.decision, labels(gate)) == (UNKNOWN, [("UNKNOWN", "INFRA")])


def test_violated_bound_counts_next_to_a_disturbed_side() -> None:
    """The sessions compare the two sides, and not a side with the bound that its test derives."""
    slow = Judgement(replace(seconds(2.0).row, at_most=1.5), RED, "expected at most 1.5")
    same = {slow.row.id: Timed(TimedOutcome.SAME, 1.0, (0.99, 1.01), 12, 0.001)}
    assert gate(gone(Verdict.INFRA, "not quiet", TIME_TEST), slow, same).decision is UNKNOWN


@UNREVIEWED
def test_disturbed_session_is_replaced_by_another(machine: Machine, out: Path, unreviewed: bool) -> None:
    made = machine.prepare(out)
    made.enter()
    for name in ("adopted", "candidate"):
        made.gate = measure.measure(made.bench, made.gate.changed(name, canaries={}), [name])
    machine.plant("adopted", spoiled=1, unreviewed=unreviewed)
    made.run()
    sessions = made.gate.paired
    assert sessions
    assert sessions.started == len(sessions.log_ratios[TIME_ROW]) + 1
    reason = "not quiet" if unreviewed else f"{TIME_ROW}: not quiet"
    assert f"last lost: adopted: {reason}" in (out / "output.txt").read_text()
    assert made.gate.decision is ADOPT
