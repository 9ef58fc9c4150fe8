"""The gate's verdict: every pair of row verdicts, every gap in the evidence, and grouping of findings by cause."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import accepted, kernel_code
from bumpgate.core.baseline import Baseline, Reviewed, judge
from bumpgate.core.findings import PEER, Decision, Finding, TimedOutcome, group
from bumpgate.core.rows import Judgement, Problem, Record, Row, RowError, Value, Verdict
from bumpgate.gate import verdict
from bumpgate.gate.drift import Drift
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import GateVerdict, Side, judge_gate
from suites.support.planted import planted

HOLD, UNKNOWN, ADOPT = Decision.HOLD, Decision.UNKNOWN, Decision.ADOPT
TEST = "suites/compile/test_breaks.py::test_breaks[cpu]"
BREAKS = "compile/nam52-regional/graph_breaks"
P, D, W, R, C, M, U, N, F, X = (
    Verdict.PASS,
    Verdict.FIXED,
    Verdict.WIN,
    Verdict.REGRESSION,
    Verdict.CHANGED,
    Verdict.MISSING,
    Verdict.NEW,
    Verdict.INSTRUMENT,
    Verdict.INFRA,
    Verdict.INCONCLUSIVE,
)
Found = list[tuple[Decision, str]]


def row(id: str = BREAKS, value: Value = 13, **fields: object) -> Row:
    made = {"id": id, "value": value, "unit": "breaks", "witness": 1, "rule": "C6", "test": TEST}
    return Row(**made | fields)  # type: ignore[arg-type]


def gone(id: str = BREAKS, **fields: object) -> Row:
    return row(id, None, witness=0, rule="", **fields)


def judged(how: Verdict, made: Row | None = None, reason: str = "", **fields: object) -> Judgement:
    found = Judgement(made or row(), how, reason, "bumpgate rebaseline --lane cpu")
    return replace(found, **fields)  # type: ignore[arg-type]


def record(*judgements: Judgement, **fields: Any) -> Record:
    return Record({"lane": "cpu"}, judgements, **fields)


def side(name: str, *judgements: Judgement, **fields: Any) -> Side:
    problems = tuple(map(Problem.from_json, fields.pop("problems", ())))
    complete = fields.pop("complete", True)
    return Side(name, record(*judgements, complete=complete, problems=problems), **fields)


def gate(
    adopted: Sequence[Judgement], candidate: Sequence[Judgement], timed: Mapping[str, Timed] | None = None
) -> GateVerdict:
    return judge_gate("cpu", side("torch 2.13.0", *adopted), side("torch 2.14.0", *candidate), timed)


def found(adopted: Judgement, candidate: Judgement) -> Found:
    """Return decision and label of each finding on one row."""
    return [(f.decision, f.label) for f in gate([adopted], [candidate]).findings]


def paired(outcome: TimedOutcome, ratio: float = 1.0) -> Timed:
    return Timed(outcome, ratio, (ratio - 0.02, ratio + 0.02), 12, 0.5)


def one(result: GateVerdict) -> Finding:
    assert len(result.findings) == 1, result.findings
    return result.findings[0]


# Rows: verdict in the adopted environment; columns: verdict in the candidate. None: the row is not in the record.
COLUMNS = (P, D, W, R, C, M, U, N, F, X, None)
TABLE: dict[Verdict | None, str] = {
    #     P D W R C M U N F X None
    P: "A A A H H H A U U U U",
    D: "A A A H H H A U U U U",
    W: "A A A H H H A U U U U",
    R: "A A A U U U A U U U U",
    C: "A A A U U U A U U U U",
    M: "U U U U U U U U U U U",
    U: "A A A H H H A U U U U",
    N: "U U U U U U U U U U U",
    F: "U U U U U U U U U U U",
    X: "U U U U U U U U U U U",
}


def test_table_of_the_product_has_every_pair_of_readings() -> None:
    """Prints the table: rows are the adopted side, columns the candidate."""
    assert set(verdict.TABLE) == set(itertools.product(verdict.Reading, repeat=2))
    print(f"{'':<13}", *(f"{candidate.name[:4]:>4}" for candidate in verdict.Reading))
    for adopted in verdict.Reading:
        cells = (verdict.TABLE[adopted, candidate].value for candidate in verdict.Reading)
        print(f"{adopted.name:<13}", *(f"{cell:>4}" for cell in cells))


@pytest.mark.parametrize("adopted", TABLE)
def test_decision_for_each_pair_of_row_verdicts(adopted: Verdict) -> None:
    """A second row passes on both sides: the first one decides."""
    assert set(TABLE) == set(Verdict) == set(COLUMNS) - {None}
    other = judged(P, row("compile/other/recompiles"))

    def measured(how: Verdict | None) -> list[Judgement]:
        return [judged(how, gone() if how in (M, F) else row()), other] if how else [other]

    for candidate, cell in zip(COLUMNS, TABLE[adopted].split(), strict=True):
        result = gate(measured(adopted), measured(candidate))
        expected = {"A": (ADOPT, 0), "H": (HOLD, 1), "U": (UNKNOWN, 125)}[cell]
        assert (result.decision, result.exit_code) == expected, candidate


def test_unreviewed_row_only_in_the_candidate_is_new() -> None:
    """A capability added by a release has rows without a baseline; a reviewed row never counts as new."""
    both = judged(P, row("compile/other/recompiles"))
    added = judged(U, row("release/cond/parts"), "not reviewed: measured 0 count")
    result = gate([both], [both, added])
    assert (result.decision, [f.label for f in result.findings]) == (ADOPT, ["NEW"])
    before = replace(added, verdict=M)
    assert gate([both, before], [both, before]).decision is UNKNOWN, "as gates before NEW were judged"
    assert gate([both], [both, judged(P, row("release/cond/parts"))]).decision is UNKNOWN


def test_unreviewed_rows_of_both_sides_are_compared_and_shown_as_one_finding() -> None:
    """They hold a candidate by a difference between the sides, or by what their test derives, and by nothing else."""
    made = [judged(U, row(f"model/{case}/parts", 3)) for case in ("a", "b")]
    finding = one(gate(made, made))
    assert (finding.decision, finding.label, finding.rows) == (
        ADOPT,
        "NEW",
        ("model/a/parts", "model/b/parts"),
    )
    assert "not reviewed, equal on both sides" in finding.head
    assert found(made[0], judged(U, row("model/a/parts", 4))) == [(HOLD, "CHANGED")]
    assert found(made[0], judged(R, row("model/a/parts", 4, expected=3, better="derived"))) == [
        (HOLD, "REGRESSION")
    ]
    time = row("model/a/seconds", 1.0, unit="s", better="lower", interval=(0.9, 1.1))
    assert list(timed_rows(record(judged(U, time)), record(judged(U, time)))) == ["model/a/seconds"]


right = [judged(P)]
A, B = side("a", *right), side("b", *right)
FAILED, FAILED_TOO = ("x.py::t: took 3 s",), ("x.py::t: took 4 s",)
SKIPPED = ("x.py::t: skipped under --gate: no wheel",)
GAPS = {
    "canary failed in the adopted": (side("a", *right, canaries={"breaks": "read 2, knows 1"}), B),
    "canary failed in the candidate": (A, side("b", *right, canaries={"breaks": "read 2"})),
    "row missing in the adopted": (side("a"), B),
    "row missing in the candidate": (A, side("b")),
    "build of the adopted failed": (Side("a", None, "No space left on device"), B),
    "build of the candidate failed": (A, Side("b", None, "no such wheel")),
    "both builds failed": (Side("a", None, "no index"), Side("b", None, "no index")),
    "no record and no word why": (A, Side("b", None)),
    "nothing selected": (side("a"), side("b")),
    "adopted run cut short": (side("a", *right, complete=False), B),
    "candidate run cut short": (A, side("b", *right, complete=False)),
    "problem in the adopted": (side("a", *right, problems=FAILED), B),
    "same test failed in both": (
        side("a", *right, problems=FAILED),
        side("b", *right, problems=("x.py::t: took 4 s",)),
    ),
    "skip in the candidate": (A, side("b", *right, problems=SKIPPED)),
}


@pytest.mark.parametrize("name", GAPS)
def test_gap_in_the_evidence_is_unknown(name: str) -> None:
    result = judge_gate("cpu", *GAPS[name])
    assert result.decision is UNKNOWN
    assert all(finding.head for finding in result.findings)
    whole = (replace(side, record=record(*right), failure="", canaries={}) for side in GAPS[name])
    assert judge_gate("cpu", *whole) == GateVerdict(ADOPT, ()), "nothing else in these sides decides"


def test_mutant_without_side_checks_adopts_a_broken_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_environment", lambda lane, side, is_good: [])
    assert judge_gate("cpu", *GAPS["canary failed in the candidate"]).decision is ADOPT


def test_failed_test_only_in_the_candidate_holds() -> None:
    candidate = side("b", *right, problems=("x.py::t: AttributeError: gone",))
    result = judge_gate("cpu", A, candidate)
    assert result.decision is HOLD
    assert one(result).repro == "pytest -m cpu -n 0 x.py::t"
    cut = side("a", *right, complete=False)
    assert judge_gate("cpu", cut, candidate).decision is UNKNOWN, "the adopted run may not have reached it"
    cut = side("b", *right, problems=("the run was cut short: 3 of 9 tests did not finish",), complete=False)
    assert judge_gate("cpu", A, cut).decision is UNKNOWN


def test_row_lost_by_an_incomplete_run_does_not_hold() -> None:
    lost = judged(M, gone())
    assert judge_gate("cpu", A, side("b", lost)).decision is HOLD
    assert judge_gate("cpu", A, side("b", lost, complete=False)).decision is UNKNOWN


def test_regression_outweighs_a_gap() -> None:
    result = judge_gate("cpu", A, side("b", judged(R), canaries={"timer": "coarse"}))
    assert ([f.decision for f in result.findings], result.exit_code) == ([HOLD, UNKNOWN], 1)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (TimedOutcome.SAME, ADOPT),
        (TimedOutcome.NOT_SLOWER, ADOPT),
        (TimedOutcome.FASTER, ADOPT),
        (TimedOutcome.SLOWER, HOLD),
        (TimedOutcome.SLOW_MODE, HOLD),
        (TimedOutcome.INCONCLUSIVE, UNKNOWN),
    ],
)
def test_decision_for_timed_rows(outcome: TimedOutcome, expected: Decision) -> None:
    timed = {"throughput/nam52/seconds": paired(outcome, 1.06)}
    result = gate(right, right, timed)
    assert result.decision is expected
    assert [f.label for f in result.findings] == ([] if outcome is TimedOutcome.SAME else [outcome.value])
    assert gate([], [], timed).decision is expected


def test_timed_row_without_sessions_is_unknown() -> None:
    never = Timed(TimedOutcome.INCONCLUSIVE, math.nan, (0.0, math.inf), 0, 1.0)
    both = one(gate([], [], dict.fromkeys(("a/b/seconds", "a/c/ratio"), never)))
    assert (both.head, both.rows) == ("no paired session gave a time", ("a/b/seconds", "a/c/ratio"))
    single = one(gate(right, right, {"a/b/seconds": never}))
    assert (single.decision, single.candidate) == (UNKNOWN, ("a/b/seconds: not measured",))


@pytest.mark.parametrize(("how", "alone"), [(R, HOLD), (W, ADOPT), (X, UNKNOWN)])
def test_paired_sessions_replace_the_stored_time(how: Verdict, alone: Decision) -> None:
    made = row("throughput/nam52/seconds", 1.2, better="lower", interval=(1.1, 1.3), unit="s")
    same = {made.id: paired(TimedOutcome.SAME)}
    adopted = [judged(P, made)]
    assert gate(adopted, [judged(how, made)], same) == GateVerdict(ADOPT, ())
    assert gate(adopted, [judged(how, made)]).decision is alone
    # A derived expectation applies to a timed row as well, and so does a canary.
    assert gate(adopted, [judged(R, replace(made, at_most=1.0))], same).decision is HOLD
    assert gate(adopted, [judged(N, made)], same).decision is UNKNOWN


def test_unmeasured_timed_row_is_decided_by_sessions() -> None:
    lost = [*right, judged(M, gone("a/b/seconds"))]
    assert gate(lost, lost, {"a/b/seconds": paired(TimedOutcome.SAME)}).decision is ADOPT
    assert gate(lost, lost).decision is UNKNOWN


def test_drift_holds_the_candidate() -> None:
    drift = Drift(date(2026, 1, 5), date(2026, 2, 9), 1.041)
    finding = one(judge_gate("cpu", A, B, drifts={"a/b/seconds": drift}))
    expected = ("a/b/seconds: +4.1 %, rising since 2026-01-05, called 2026-02-09",)
    assert (finding.decision, finding.candidate) == (HOLD, expected)


def breaks(case: str, *evidence: str, value: int = 14) -> Row:
    return row(f"compile/{case}/graph_breaks", value, evidence=evidence)


def test_rows_with_one_cause_are_one_finding() -> None:
    known = ("call to print at a.py:3", "call to print at a.py:3")
    new = "data-dependent branch at moe.py:88 <object at 0x7f2a>"
    adopted = [judged(P, breaks(case, *known, value=13)) for case in "abc"]
    candidate = [judged(C, breaks(case, *known, new)) for case in "ab"]
    candidate += [judged(C, breaks("c", known[0], "generic break at mla.py:5"))]
    first, second = gate(adopted, candidate).findings
    assert first.rows == ("compile/a/graph_breaks", "compile/b/graph_breaks")
    assert second.rows == ("compile/c/graph_breaks",)
    assert first.head == "data-dependent branch at moe.py:88 <object at 0x_>"
    assert first.adopted == ("compile/a/graph_breaks: 13 breaks", "compile/b/graph_breaks: 13 breaks")
    assert first.candidate[:2] == ("compile/a/graph_breaks: 14 breaks (C6)", first.head)
    assert first.repro == f"pytest -m cpu -n 0 '{TEST}'"
    assert second.adopted == ("compile/c/graph_breaks: 13 breaks", known[0])


def test_grouping_ignores_addresses_and_separates_metrics() -> None:
    pairs = [(case, metric) for case in "ab" for metric in ("breaks", "recompiles")]
    adopted = [judged(P, row(f"compile/{c}/{m}")) for c, m in pairs]
    candidate = [judged(C, row(f"compile/{c}/{m}", 20, evidence=(f"guard on 0x{c * 4}",))) for c, m in pairs]
    grouped = [(f.metric, len(f.rows)) for f in gate(adopted, candidate).findings]
    assert grouped == [("breaks", 2), ("recompiles", 2)]


def test_finding_shows_the_rule_the_review_and_the_limit() -> None:
    finding = one(gate(right, [judged(C, row(value=14), reviewed=13, limit="= 13")]))
    assert finding.candidate == (f"{BREAKS}: 14 breaks (C6, reviewed 13, limit = 13)",)


def test_removed_evidence_is_the_cause() -> None:
    adopted, candidate = breaks("a", "kernel fused_add", "kernel mm"), breaks("a", "kernel mm")
    assert one(gate([judged(P, adopted)], [judged(C, candidate)])).head == "gone: kernel fused_add"


def test_rows_lost_by_one_failure_are_one_finding() -> None:
    """Independent of metric and test: the reason is the cause."""
    ids = ["kernels/mla/forward_error_ratio", "kernels/mla/gradient_error_ratio"]
    tests = [f"suites/kernels/test_mla.py::test_{n}" for n in range(2)]
    lost = [
        judged(M, gone(id, test=test), f"not reported by {test}: AttributeError: no mla")
        for id, test in zip(ids, tests)
    ]
    finding = one(gate([judged(P, row(id)) for id in ids], lost))
    assert finding.rows == tuple(ids)
    assert finding.head == "not reported by its test: AttributeError: no mla"


def test_row_red_on_both_sides_is_unknown_with_both_values() -> None:
    finding = one(gate([judged(C, row(value=14))], [judged(C, row(value=15))]))
    assert (finding.decision, finding.label) == (UNKNOWN, "RED IN BOTH")
    assert finding.adopted[0].endswith("14 breaks (C6)")
    assert finding.candidate[0].endswith("15 breaks (C6)")
    assert finding.repro == "pytest -m cpu; bumpgate rebaseline --lane cpu", (
        "it works with any earlier record"
    )


def test_canary_and_its_dependent_rows_are_one_finding() -> None:
    why = "read 2, knows 1"
    candidate = side("b", judged(N, reason=f"instrument breaks: {why}"), canaries={"breaks": why})
    finding = one(judge_gate("cpu", A, candidate))
    assert (finding.rows, finding.candidate[0]) == ((BREAKS,), f"b: instrument breaks: {why}")


def test_per_build_value_does_not_hold() -> None:
    made = row(per_build=True)
    assert found(judged(P, made), judged(C, made, explains=True)) == []


@pytest.mark.parametrize(
    ("adopted", "candidate", "expected"),
    [
        ((1, True, P), (1, True, P), []),
        ((0, False, P), (0, False, P), []),
        ((0, True, D), (0, True, D), []),
        ((1, True, P), (0, True, D), [(ADOPT, "FIXED")]),
        ((1, True, P), (0, False, P), [(ADOPT, "FIXED")]),
        ((0, False, P), (1, True, P), [(HOLD, "REGRESSION")]),
        ((0, False, P), (1, False, R), [(HOLD, "REGRESSION")]),
        ((1, True, P), (1, False, R), [(ADOPT, "KNOWN DEFECT")]),
        ((1, True, P), (1, True, N), [(UNKNOWN, "INSTRUMENT")]),
        ((1, True, P), None, [(HOLD, "MISSING")]),
    ],
)
def test_defect_rows_compare_presence(
    adopted: tuple[int, bool, Verdict], candidate: tuple[int, bool, Verdict] | None, expected: Found
) -> None:
    """Of each side: whether the defect is present, whether its version is inside the range, and the verdict."""
    id = "cache/layers-cpu/truncated_object_loaded"

    def defect(value: int, inside: bool, how: Verdict) -> Judgement:
        fields = {"unit": "present", "better": "defect", "evidence": ("known in torch==2.13.*",)}
        return judged(how, row(id, value, at_most=int(inside), **fields))

    after = defect(*candidate) if candidate else judged(M, gone(id))
    assert found(defect(*adopted), after) == expected


def compiled(number: int, **fields: object) -> Judgement:
    test = "suites/kernels/codegen/test_codegen.py::test_kernels[cpu]"
    made = row(f"kernels/op{number}-bf16-triton3.8.0/spills", unit="bytes", test=test, **fields)
    return judged(U, made, "not reviewed: measured 13 bytes")


def test_tier_only_in_the_candidate_is_new() -> None:
    wrong = compiled(3, value=76, expected=0, better="derived")
    finding = one(gate(right, [*right, *(compiled(n) for n in range(3)), wrong]))
    assert (finding.decision, finding.label, len(finding.rows)) == (ADOPT, "NEW", 4)
    assert finding.candidate == ("4 rows, 1 of them against what their tests derive",)
    alone = gate([], [compiled(1)])
    assert [(f.decision, f.label) for f in alone.findings] == [(UNKNOWN, "NOTHING"), (ADOPT, "NEW")]
    assert gate([*right, compiled(1)], [*right, compiled(2)]).decision is UNKNOWN, "both sides collected it"
    cut = side("a", *right, complete=False)
    assert judge_gate("cpu", cut, side("b", *right, compiled(1))).decision is UNKNOWN


def test_record_of_another_lane_is_refused() -> None:
    other = Side("b", Record({"lane": "h200"}, tuple(right)))
    with pytest.raises(ValueError, match="record of lane 'h200', not 'cpu'"):
        judge_gate("cpu", A, other)


findings = st.builds(
    Finding,
    st.sampled_from(Decision),
    st.sampled_from(["CHANGED", "SLOWER"]),
    st.sampled_from(["breaks", ""]),
    st.sampled_from(["here", "there"]),
    st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(findings, max_size=12))
def test_grouping_keeps_every_row_and_decision(loose: list[Finding]) -> None:
    def cause(f: Finding) -> tuple[object, ...]:
        return f.decision, f.label, f.metric, f.head

    grouped = group(loose)
    assert {f.decision for f in grouped} == {f.decision for f in loose}
    cells = {(*cause(f), r) for f in loose for r in f.rows}
    assert {(*cause(f), r) for f in grouped for r in f.rows} == cells
    assert group(grouped) == grouped
    order = [list(Decision).index(f.decision) for f in grouped]
    assert order == sorted(order)
    assert len({cause(f) for f in grouped}) == len(grouped)


# What excuses a row of the candidate, another build or an acceptance, does not excuse a value that is worse.


KERNELS, CODE = "compile/nam52-regional/generated_kernels", "kernels/attention-codegen/code"
OLD, NEW = {"torch": "2.13.0", "triton": None}, {"torch": "2.15.0", "triton": None}
REVIEWED_CODE = kernel_code.text(registers=200, spills=0, wgmma=64, programs_per_sm=2)
ACCEPTED_CODE = kernel_code.text(registers=210, spills=8, wgmma=64, programs_per_sm=2)
WORSE_CODE = kernel_code.text(registers=255, spills=4000, wgmma=0, programs_per_sm=1)
BASELINE = Baseline(
    "cpu",
    OLD,
    {
        KERNELS: Reviewed(100, "kernels", "exact", test=TEST, per_build=True),
        CODE: Reviewed(None, "counts", "code", test=TEST, values={"3.7.1": REVIEWED_CODE}),
    },
)


def reviewed(made: Row, build: dict[str, str | None], accepts: int | str | None) -> Judgement:
    """Judge a row by BASELINE and an acceptance of one value."""
    entry = accepted.Acceptance("cpu", made.id, accepts, "ann", "why", date(2026, 11, 1), date(2027, 1, 1))
    entries = accepted.of_lane([entry] if accepts else [], "cpu")
    return accepted.apply(
        judge(made, BASELINE, failed_instruments={}, build=build), BASELINE, entries, date(2026, 12, 1)
    )


def kernels(value: int, build: dict[str, str | None], accepts: int | None = None) -> Judgement:
    return reviewed(Row(KERNELS, value, "kernels", 1, "C6", per_build=True, test=TEST), build, accepts)


@planted("C39", "a candidate that generates ten times the kernels of the adopted build")
@pytest.mark.parametrize("value", [100, 101])
def test_worse_value_of_another_build_holds(value: int) -> None:
    """With 101 kernels for a reviewed 100, the adopted side is red. Its repair does not explain 1000."""
    adopted, candidate = kernels(value, OLD), kernels(1000, NEW)
    assert (adopted.red, candidate.red) == (value != 100, False)
    assert found(adopted, candidate)[0] == (HOLD, "WORSE")


def test_value_of_another_build_repairs_a_red_adopted_side() -> None:
    assert found(kernels(101, OLD), kernels(99, NEW))[0] == (ADOPT, "FIXED")


def test_acceptance_of_the_adopted_value_excuses_no_worse_one() -> None:
    adopted, candidate = kernels(120, OLD, 120), kernels(1000, NEW, 120)
    assert (bool(adopted.accepted), bool(candidate.accepted)) == (True, False)
    assert found(adopted, candidate)[0] == (HOLD, "WORSE")
    assert found(kernels(100, OLD, 1000), kernels(1000, NEW, 1000))[0][0] is ADOPT


def test_acceptance_of_adopted_code_excuses_no_spills() -> None:
    sides = [
        reviewed(
            Row(CODE, value, "counts", 1, "C6", better="code", test=TEST),
            {"torch": "2.13.0", "triton": triton},
            ACCEPTED_CODE,
        )
        for value, triton in ((ACCEPTED_CODE, "3.7.1"), (WORSE_CODE, "3.9.0"))
    ]
    assert found(*sides)[0] == (HOLD, "WORSE")


@pytest.mark.parametrize("swap", [False, True])
def test_time_with_an_interval_on_one_side_is_of_another_kind(swap: bool) -> None:
    """The sessions need an interval on both sides, and the comparison of single readings one on neither."""
    fields = {"unit": "s", "better": "lower", "tolerance": 5.0}
    sides = [
        judged(P, row("throughput/a/seconds", value, interval=interval, **fields), tolerance=5.0)
        for value, interval in ((1.0, None), (9.0, (8.9, 9.1)))
    ][:: -1 if swap else 1]
    assert timed_rows(*map(record, sides)) == {}
    assert found(*sides) == [(UNKNOWN, "OTHER KIND")]


# A ratio to another implementation that becomes faster does not hold a candidate; the own time does.


OWN, RATIO = "kernels/scan/milliseconds", "kernels/scan/over_peer"


def ratio(value: float, how: Verdict = P, **fields: Any) -> Judgement:
    made = {"unit": "ratio", "better": "lower", "tolerance": 0.1, "own": OWN} | fields
    return judged(how, row(RATIO, value, **made), tolerance=0.1)


def own(value: float = 2.0, how: Verdict = P, **fields: Any) -> Judgement:
    made = {"unit": "ms", "better": "lower", "tolerance": 0.1, "interval": (value, value)} | fields
    return judged(how, row(OWN, value, **made))


def of_ratios(adopted: Sequence[Judgement], candidate: Sequence[Judgement]) -> list[tuple[Any, ...]]:
    return [(f.decision, f.label, f.rows) for f in gate(adopted, candidate).findings]


WORSE = pytest.mark.parametrize(
    "worse", [ratio(1.5, R), ratio(1.2)], ids=["than reviewed", "than the adopted side"]
)


@WORSE
def test_faster_peer_is_shown_and_holds_nothing(worse: Judgement) -> None:
    adopted, candidate = [own(), ratio(1.0)], [own(), worse]
    assert of_ratios(adopted, candidate) == [(ADOPT, PEER, (RATIO,))]
    assert timed_rows(record(*adopted), record(*candidate)) == {OWN: TEST}, "sessions measure the own time"


@WORSE
def test_ratio_alone_judges_without_the_own_time(worse: Judgement) -> None:
    """Of a side that does not report it, or if the row does not name it."""
    assert (ADOPT, PEER, (RATIO,)) not in of_ratios([own(), ratio(1.0)], [worse])
    bare = [replace(j, row=replace(j.row, own="")) for j in (ratio(1.0), worse)]
    assert gate([own(), bare[0]], [own(), bare[1]]).decision is not ADOPT


NOT_EXCUSED = {
    "own row is a count": (own(unit="kernels", interval=None), ratio(1.5, R)),
    "own row has no direction": (own(better="exact", tolerance=0.0, interval=None), ratio(1.5, R)),
    "NaN": (own(), ratio(math.nan, R)),
    "beyond a derived bound": (own(), ratio(1.5, R, at_most=1.0)),
}


@pytest.mark.parametrize("name", NOT_EXCUSED)
def test_peer_excuses_no_other_row(name: str) -> None:
    of_side, candidate = NOT_EXCUSED[name]
    assert gate([of_side, ratio(1.0)], [of_side, candidate]).decision is not ADOPT
    if name.startswith("own"):
        assert gate([of_side, ratio(1.0)], [of_side, candidate]).decision is HOLD


def test_slower_own_time_and_a_better_ratio_are_no_peers() -> None:
    slower = of_ratios([own(), ratio(1.0)], [own(3.0, R), ratio(1.5, R)])
    assert (HOLD, "REGRESSION", (OWN,)) in slower
    assert of_ratios([own(), ratio(1.0)], [own(), ratio(1.04)]) == []
    assert of_ratios([own(), ratio(1.0)], [own(), ratio(0.5, W)]) == [(ADOPT, "WIN", (RATIO,))]


@pytest.mark.parametrize("name", [RATIO, "no id"])
def test_own_names_another_row_and_is_kept_in_a_record(name: str) -> None:
    with pytest.raises(RowError, match="own must be the id of another row"):
        ratio(1.0, own=name)
    made = ratio(1.0).row
    assert Row.from_json(made.to_json()) == made
    assert "own" not in own().row.to_json()


CENSUS = {"a.py::test_op[add]": "passed", "a.py::test_op[mul]": "passed", "a.py::test_skip": "skipped"}


@pytest.mark.parametrize(
    ("outcome", "head"),
    [
        ("", "not collected"),
        ("deselected", "deselected"),
        ("xfailed", "failing as xfail expects"),
        ("rerun", "run again after a failure"),
        ("not reached", "collected and not run"),
        ("passed", ""),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_test_that_ran_in_the_adopted_set_and_proves_nothing_now_holds(
    outcome: str, head: str, complete: bool
) -> None:
    after = {test: how for test, how in (CENSUS | {"a.py::test_op[mul]": outcome}).items() if how}
    adopted, candidate = record(*right, tests=CENSUS), record(*right, complete=complete, tests=after)
    lost = [
        f
        for f in judge_gate("cpu", Side("a", adopted), Side("b", candidate)).findings
        if f.label == "MISSING"
    ]
    assert [f.head for f in lost] == ([f"tests that ran in the adopted set: {head}"] if head else [])
    for f in lost:
        assert f.decision is (HOLD if complete else UNKNOWN)
        assert (f.tests, f.adopted) == (("a.py::test_op[mul]",), ("a.py::test_op[mul]: passed",))
        assert f.candidate == (f"a.py::test_op[mul]: {outcome or 'absent'}",)


def test_tests_whose_rows_are_missing_are_one_finding() -> None:
    adopted = Side("a", record(*right, tests={TEST: "passed"}))
    lost = [f for f in judge_gate("cpu", adopted, side("b")).findings if f.label == "MISSING"]
    assert [f.tests for f in lost] == [()]
