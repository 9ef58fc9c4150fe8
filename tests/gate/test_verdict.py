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

FIXED = settings(derandomize=True, max_examples=60, deadline=None)
HOLD, UNKNOWN, ADOPT = Decision.HOLD, Decision.UNKNOWN, Decision.ADOPT
TEST = "suites/compile/test_breaks.py::test_breaks[cpu]"


def row(id: str = "compile/nam52-regional/graph_breaks", value: Value = 13, **fields: object) -> Row:
    made = {"id": id, "value": value, "unit": "breaks", "witness": 1, "rule": "C6", "test": TEST}
    return Row(**made | fields)  # type: ignore[arg-type]


def gone(id: str = "compile/nam52-regional/graph_breaks") -> Row:
    return row(id, None, witness=0, rule="")


def judged(row_verdict: Verdict, made: Row | None = None, reason: str = "") -> Judgement:
    return Judgement(made or row(), row_verdict, reason, "bumpgate rebaseline --lane cpu")


def side(name: str, *judgements: Judgement, **fields: object) -> Side:
    problems = tuple(map(Problem.from_json, fields.pop("problems", ())))  # type: ignore[call-overload]
    record = Record({"lane": "cpu"}, judgements, bool(fields.pop("complete", True)), problems)
    return Side(name, record, **fields)  # type: ignore[arg-type]


def gate(
    adopted: list[Judgement], candidate: list[Judgement], timed: Mapping[str, Timed] | None = None
) -> GateVerdict:
    return judge_gate("cpu", side("torch 2.13.0", *adopted), side("torch 2.14.0", *candidate), timed)


def paired(outcome: TimedOutcome, ratio: float = 1.0, sessions: int = 12) -> Timed:
    return Timed(outcome, ratio, (ratio - 0.02, ratio + 0.02), sessions, 0.5)


def one(result: GateVerdict) -> Finding:
    assert len(result.findings) == 1, result.findings
    return result.findings[0]


# Rows: verdict in the adopted environment; columns: verdict in the candidate. None: the row is not in the record.
P, D, W, R, C, M, N, F, X = (
    Verdict.PASS,
    Verdict.FIXED,
    Verdict.WIN,
    Verdict.REGRESSION,
    Verdict.CHANGED,
    Verdict.MISSING,
    Verdict.INSTRUMENT,
    Verdict.INFRA,
    Verdict.INCONCLUSIVE,
)
COLUMNS = (P, D, W, R, C, M, N, F, X, None)
TABLE: dict[Verdict | None, str] = {
    #     P D W R C M N F X None
    P: "A A A H H H U U U U",
    D: "A A A H H H U U U U",
    W: "A A A H H H U U U U",
    R: "A A A U U U U U U U",
    C: "A A A U U U U U U U",
    M: "U U U U U U U U U U",
    N: "U U U U U U U U U U",
    F: "U U U U U U U U U U",
    X: "U U U U U U U U U U",
}


def test_table_of_the_product_has_every_pair_of_readings() -> None:
    """Prints the table: rows are the adopted side, columns the candidate."""
    assert set(verdict.TABLE) == set(itertools.product(verdict.Reading, repeat=2))
    print(f"{'':<13}", *(f"{candidate.name[:4]:>4}" for candidate in verdict.Reading))
    for adopted in verdict.Reading:
        cells = (verdict.TABLE[adopted, candidate].value for candidate in verdict.Reading)
        print(f"{adopted.name:<13}", *(f"{cell:>4}" for cell in cells))


def test_verdict_table_is_complete() -> None:
    assert set(TABLE) == set(Verdict) == set(COLUMNS) - {None}
    assert all(len(line.split()) == len(COLUMNS) for line in TABLE.values())


def measured(row_verdict: Verdict | None) -> list[Judgement]:
    if row_verdict is None:
        return []
    return [judged(row_verdict, gone() if row_verdict in (M, F) else row())]


@pytest.mark.parametrize(
    ("adopted", "candidate", "expected"),
    [(g, b, cell) for g, line in TABLE.items() for b, cell in zip(COLUMNS, line.split())],
)
def test_decision_for_each_pair_of_row_verdicts(
    adopted: Verdict, candidate: Verdict | None, expected: str
) -> None:
    # A second row that passes on both sides: the first one decides.
    right = judged(P, row("compile/other/recompiles"))
    result = gate([*measured(adopted), right], [*measured(candidate), right])
    assert result.decision is {"A": ADOPT, "H": HOLD, "U": UNKNOWN}[expected]
    assert result.exit_code == {"A": 0, "H": 1, "U": 125}[expected]


def test_unreviewed_row_only_in_the_candidate_is_new() -> None:
    """A capability added by a release has rows without a baseline; a reviewed row never counts as new."""
    both = judged(P, row("compile/other/recompiles"))
    added = judged(M, row("release/cond/parts"), "not reviewed: measured 0 count")
    result = gate([both], [both, added])
    assert (result.decision, [f.label for f in result.findings]) == (ADOPT, ["NEW"])
    assert gate([both, added], [both, added]).decision is UNKNOWN
    assert gate([both], [both, judged(P, row("release/cond/parts"))]).decision is UNKNOWN


def test_exit_codes_match_git_bisect() -> None:
    assert {d.name: d.value for d in Decision} == {"ADOPT": 0, "HOLD": 1, "UNKNOWN": 125}


right = [judged(P)]
GAPS = {
    "canary failed in the adopted": (
        side("a", *right, canaries={"breaks": "read 2, knows 1"}),
        side("b", *right),
    ),
    "canary failed in the candidate": (side("a", *right), side("b", *right, canaries={"breaks": "read 2"})),
    "row missing in the adopted": (side("a"), side("b", *right)),
    "row missing in the candidate": (side("a", *right), side("b")),
    "build of the adopted failed": (Side("a", None, "No space left on device"), side("b", *right)),
    "build of the candidate failed": (side("a", *right), Side("b", None, "no such wheel")),
    "both builds failed": (Side("a", None, "no index"), Side("b", None, "no index")),
    "no record and no word why": (side("a", *right), Side("b", None)),
    "nothing selected": (side("a"), side("b")),
    "adopted run cut short": (side("a", *right, complete=False), side("b", *right)),
    "candidate run cut short": (side("a", *right), side("b", *right, complete=False)),
    "problem in the adopted": (side("a", *right, problems=("x.py::t: failed",)), side("b", *right)),
    "same test failed in both": (
        side("a", *right, problems=("x.py::t: took 3 s",)),
        side("b", *right, problems=("x.py::t: took 4 s",)),
    ),
    "skip in the candidate": (
        side("a", *right),
        side("b", *right, problems=("x.py::t: skipped under --gate: no wheel",)),
    ),
}


@pytest.mark.parametrize("name", GAPS)
def test_gap_in_the_evidence_is_unknown(name: str) -> None:
    result = judge_gate("cpu", *GAPS[name])
    assert result.decision is UNKNOWN
    assert all(finding.head for finding in result.findings)


@pytest.mark.parametrize("name", GAPS)
def test_sides_without_gaps_are_adopted(name: str) -> None:
    """Only the gaps above decide, nothing else in these sides."""
    adopted, candidate = (Side(s.name, Record({"lane": "cpu"}, tuple(right))) for s in GAPS[name])
    assert judge_gate("cpu", adopted, candidate) == GateVerdict(ADOPT, ())


def test_mutant_without_side_checks_adopts_a_broken_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_environment", lambda lane, side, is_good: [])
    assert judge_gate("cpu", *GAPS["canary failed in the candidate"]).decision is ADOPT


def test_failed_test_only_in_the_candidate_holds() -> None:
    candidate = side("b", *right, problems=("x.py::t: AttributeError: gone",))
    result = judge_gate("cpu", side("a", *right), candidate)
    assert result.decision is HOLD
    assert one(result).repro == "pytest -m cpu -n 0 x.py::t"
    seen_before = side("a", *right, complete=False)
    assert judge_gate("cpu", seen_before, candidate).decision is UNKNOWN, (
        "the adopted run may not have reached it"
    )
    cut = side("b", *right, problems=("the run was cut short: 3 of 9 tests did not finish",), complete=False)
    assert judge_gate("cpu", side("a", *right), cut).decision is UNKNOWN


def test_row_lost_by_an_incomplete_run_does_not_hold() -> None:
    lost = judged(M, gone())
    assert judge_gate("cpu", side("a", *right), side("b", lost)).decision is HOLD
    assert judge_gate("cpu", side("a", *right), side("b", lost, complete=False)).decision is UNKNOWN


def test_regression_outweighs_a_gap() -> None:
    candidate = side("b", judged(R), canaries={"timer": "coarse"})
    result = judge_gate("cpu", side("a", *right), candidate)
    assert [f.decision for f in result.findings] == [HOLD, UNKNOWN]
    assert result.exit_code == 1


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
    (both,) = judge_gate(
        "cpu", side("a"), side("b"), dict.fromkeys(("a/b/seconds", "a/c/ratio"), never)
    ).findings
    assert (both.head, both.rows) == ("no paired session gave a time", ("a/b/seconds", "a/c/ratio"))
    timed = {"a/b/seconds": never}
    found = one(gate(right, right, timed))
    assert found.decision is UNKNOWN
    assert found.candidate == ("a/b/seconds: not measured",)


@pytest.mark.parametrize("row_verdict", [R, W, X])
def test_paired_sessions_replace_the_stored_time(row_verdict: Verdict) -> None:
    made = row("throughput/nam52/seconds", 1.2, better="lower", interval=(1.1, 1.3), unit="s")
    adopted, candidate = [judged(P, made)], [judged(row_verdict, made)]
    assert gate(adopted, candidate, {made.id: paired(TimedOutcome.SAME)}) == GateVerdict(ADOPT, ())
    assert gate(adopted, candidate).decision is {R: HOLD, W: ADOPT, X: UNKNOWN}[row_verdict]
    # A derived expectation applies to a timed row as well, and so does a canary.
    bound = replace(made, at_most=1.0)
    assert gate([judged(P, made)], [judged(R, bound)], {made.id: paired(TimedOutcome.SAME)}).decision is HOLD
    assert gate(adopted, [judged(N, made)], {made.id: paired(TimedOutcome.SAME)}).decision is UNKNOWN


def test_unmeasured_timed_row_is_decided_by_sessions() -> None:
    lost = [judged(M, gone("a/b/seconds"))]
    assert gate(right + lost, right + lost, {"a/b/seconds": paired(TimedOutcome.SAME)}).decision is ADOPT
    assert gate(right + lost, right + lost).decision is UNKNOWN


def test_drift_holds_the_candidate() -> None:
    drift = Drift(date(2026, 1, 5), date(2026, 2, 9), 1.041)
    result = judge_gate("cpu", side("a", *right), side("b", *right), drifts={"a/b/seconds": drift})
    assert result.decision is HOLD
    assert one(result).candidate == ("a/b/seconds: +4.1 %, rising since 2026-01-05, called 2026-02-09",)


def breaks(case: str, *evidence: str, value: int = 14) -> Row:
    return row(f"compile/{case}/graph_breaks", value, evidence=evidence)


def test_rows_with_one_cause_are_one_finding() -> None:
    known = ("call to print at a.py:3", "call to print at a.py:3")
    new = "data-dependent branch at moe.py:88 <object at 0x7f2a>"
    adopted = [judged(P, breaks(case, *known, value=13)) for case in "abc"]
    candidate = [judged(C, breaks(case, *known, new)) for case in "ab"]
    candidate += [judged(C, breaks("c", known[0], "generic break at mla.py:5"))]
    result = gate(adopted, candidate)
    assert [f.rows for f in result.findings] == [
        ("compile/a/graph_breaks", "compile/b/graph_breaks"),
        ("compile/c/graph_breaks",),
    ]
    first, second = result.findings
    assert first.head == "data-dependent branch at moe.py:88 <object at 0x_>"
    assert first.adopted == ("compile/a/graph_breaks: 13 breaks", "compile/b/graph_breaks: 13 breaks")
    assert first.candidate[:2] == ("compile/a/graph_breaks: 14 breaks (C6)", first.head)
    assert first.repro == f"pytest -m cpu -n 0 '{TEST}'"
    assert second.adopted == ("compile/c/graph_breaks: 13 breaks", known[0])


def test_grouping_ignores_addresses_and_separates_metrics() -> None:
    adopted = [judged(P, row(f"compile/{c}/{m}")) for c in "ab" for m in ("breaks", "recompiles")]
    candidate = [
        judged(C, row(f"compile/{c}/{m}", 20, evidence=(f"guard on 0x{c * 4}",)))
        for c in "ab"
        for m in ("breaks", "recompiles")
    ]
    assert [(f.metric, len(f.rows)) for f in gate(adopted, candidate).findings] == [
        ("breaks", 2),
        ("recompiles", 2),
    ]


def test_finding_shows_the_rule_the_review_and_the_limit() -> None:
    changed = replace(judged(C, row(value=14)), reviewed=13, limit="= 13")
    assert one(gate([judged(P)], [changed])).candidate == (
        f"{row().id}: 14 breaks (C6, reviewed 13, limit = 13)",
    )


def test_removed_evidence_is_the_cause() -> None:
    adopted = [judged(P, breaks("a", "kernel fused_add", "kernel mm"))]
    candidate = [judged(C, breaks("a", "kernel mm"))]
    assert one(gate(adopted, candidate)).head == "gone: kernel fused_add"


def test_rows_lost_by_one_failure_are_one_finding() -> None:
    """Independent of metric and test: the reason is the cause."""
    ids = ["kernels/mla/forward_error_ratio", "kernels/mla/gradient_error_ratio"]
    adopted = [judged(P, row(id)) for id in ids]
    candidate = []
    for n, id in enumerate(ids):
        test = f"suites/kernels/test_mla.py::test_{n}"
        reason = f"not reported by {test}: AttributeError: no mla"
        candidate.append(judged(M, replace(gone(id), test=test), reason))
    found = one(gate(adopted, candidate))
    assert found.rows == tuple(ids)
    assert found.head == "not reported by its test: AttributeError: no mla"


def test_row_red_on_both_sides_is_unknown_with_both_values() -> None:
    found = one(gate([judged(C, row(value=14))], [judged(C, row(value=15))]))
    assert (found.decision, found.label) == (UNKNOWN, "RED IN BOTH")
    assert found.adopted[0].endswith("14 breaks (C6)")
    assert found.candidate[0].endswith("15 breaks (C6)")
    assert found.repro == "bumpgate rebaseline --lane cpu"


def test_canary_and_its_dependent_rows_are_one_finding() -> None:
    candidate = side(
        "b", judged(N, reason="instrument breaks: read 2, knows 1"), canaries={"breaks": "read 2, knows 1"}
    )
    found = one(judge_gate("cpu", side("a", *right), candidate))
    assert found.rows == (row().id,)
    assert found.candidate[0] == "b: instrument breaks: read 2, knows 1"


def test_per_build_value_does_not_hold() -> None:
    differs = replace(judged(C, row(per_build=True)), explains=True)
    assert gate([judged(P, row(per_build=True))], [differs]) == GateVerdict(ADOPT, ())


def defect(value: int, inside: bool, row_verdict: Verdict) -> Judgement:
    made = row(
        "cache/layers-cpu/truncated_object_loaded",
        value,
        unit="present",
        better="defect",
        at_most=int(inside),
        evidence=("known in torch==2.13.*",),
    )
    return judged(row_verdict, made)


@pytest.mark.parametrize(
    ("adopted", "candidate", "expected"),
    [
        ((1, True, P), (1, True, P), None),
        ((0, False, P), (0, False, P), None),
        ((0, True, D), (0, True, D), None),
        ((1, True, P), (0, True, D), (ADOPT, "FIXED")),
        ((1, True, P), (0, False, P), (ADOPT, "FIXED")),
        ((0, False, P), (1, True, P), (HOLD, "REGRESSION")),
        ((0, False, P), (1, False, R), (HOLD, "REGRESSION")),
        ((1, True, P), (1, False, R), (ADOPT, "KNOWN DEFECT")),
        ((1, True, P), (1, True, N), (UNKNOWN, "INSTRUMENT")),
    ],
)
def test_defect_rows_compare_presence(
    adopted: tuple[int, bool, Verdict],
    candidate: tuple[int, bool, Verdict],
    expected: tuple[Decision, str] | None,
) -> None:
    found = gate([defect(*adopted)], [defect(*candidate)]).findings
    assert [(f.decision, f.label) for f in found] == ([expected] if expected else [])


def test_lost_defect_row_holds() -> None:
    lost = judged(M, gone("cache/layers-cpu/truncated_object_loaded"))
    assert gate([defect(1, True, P)], [lost]).decision is HOLD


CODEGEN = "suites/kernels/codegen/test_codegen.py::test_kernels[cpu]"


def compiled(number: int, **fields: object) -> Judgement:
    made = row(f"kernels/op{number}-bf16-triton3.8.0/spills", unit="bytes", test=CODEGEN, **fields)
    return judged(M, made, "not reviewed: measured 13 bytes")


def test_tier_only_in_the_candidate_is_new() -> None:
    candidate = [
        judged(P),
        *(compiled(n) for n in range(3)),
        compiled(3, value=76, expected=0, better="derived"),
    ]
    finding = one(gate([judged(P)], candidate))
    assert (finding.decision, finding.label, len(finding.rows)) == (ADOPT, "NEW", 4)
    assert finding.candidate == ("4 rows, 1 of them against what their tests derive",)


def test_gate_with_only_new_rows_compares_nothing() -> None:
    result = gate([], [compiled(1)])
    assert [(f.decision, f.label) for f in result.findings] == [(UNKNOWN, "NOTHING"), (ADOPT, "NEW")]


def test_tier_collected_by_both_sides_is_compared() -> None:
    assert gate([judged(P), compiled(1)], [judged(P), compiled(2)]).decision is UNKNOWN


def test_tier_is_not_new_if_the_adopted_run_is_incomplete() -> None:
    adopted = side("torch 2.13.0", judged(P), complete=False)
    assert judge_gate("cpu", adopted, side("torch 2.14.0", judged(P), compiled(1))).decision is UNKNOWN


def test_record_of_another_lane_is_refused() -> None:
    other = Side("b", Record({"lane": "h200"}, tuple(right)))
    with pytest.raises(ValueError, match="record of lane 'h200', not 'cpu'"):
        judge_gate("cpu", side("a", *right), other)


findings = st.builds(
    Finding,
    st.sampled_from(Decision),
    st.sampled_from(["CHANGED", "SLOWER"]),
    st.sampled_from(["breaks", ""]),
    st.sampled_from(["here", "there"]),
    st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple),
)


@FIXED
@given(st.lists(findings, max_size=12))
def test_grouping_keeps_every_row_and_decision(loose: list[Finding]) -> None:
    grouped = group(loose)
    assert {f.decision for f in grouped} == {f.decision for f in loose}
    cells = {(f.decision, f.label, f.metric, f.head, r) for f in loose for r in f.rows}
    assert {(f.decision, f.label, f.metric, f.head, r) for f in grouped for r in f.rows} == cells
    assert group(grouped) == grouped
    order = [list(Decision).index(f.decision) for f in grouped]
    assert order == sorted(order)
    for a, b in itertools.combinations(grouped, 2):
        assert (a.decision, a.label, a.metric, a.head) != (b.decision, b.label, b.metric, b.head)


# What excuses a row of the candidate, another build or an acceptance, does not excuse a value that is worse.


COUNT_TEST = "suites/compile/test_a.py::test_a[cpu]"
KERNELS, CODE = "compile/nam52-regional/generated_kernels", "kernels/attention-codegen/code"
OLD, NEW = {"torch": "2.13.0", "triton": None}, {"torch": "2.15.0", "triton": None}
REVIEWED_CODE = kernel_code.text(registers=200, spills=0, wgmma=64, programs_per_sm=2)
BASELINE = Baseline(
    "cpu",
    OLD,
    {
        KERNELS: Reviewed(100, "kernels", "exact", test=COUNT_TEST, per_build=True),
        CODE: Reviewed(None, "counts", "code", test=COUNT_TEST, values={"3.7.1": REVIEWED_CODE}),
    },
)


def record(*judgements: Judgement) -> Record:
    return Record({"lane": "cpu"}, judgements)


def first_finding(adopted: Judgement, candidate: Judgement) -> tuple[Decision, str]:
    """Return decision and label of the first finding."""
    found = judge_gate("cpu", Side("torch 2.13.0", record(adopted)), Side("torch 2.15.0", record(candidate)))
    return found.decision, found.findings[0].label


def accept(row: str, value: int | str) -> accepted.Acceptance:
    return accepted.Acceptance("cpu", row, value, "ann", "why", date(2026, 11, 1), date(2027, 1, 1))


def kernels(
    value: int, build: dict[str, str | None], entries: Sequence[accepted.Acceptance] = ()
) -> Judgement:
    row = Row(KERNELS, value, "kernels", 1, "C6", per_build=True, test=COUNT_TEST)
    found = judge(row, BASELINE, failed_instruments={}, build=build)
    return accepted.apply(found, BASELINE, accepted.of_lane(entries, "cpu"), date(2026, 12, 1))


@planted("C39", "a candidate that generates ten times the kernels of the adopted build")
@pytest.mark.parametrize("value", [100, 101])
def test_worse_value_of_another_build_holds(value: int) -> None:
    """With 101 kernels for a reviewed 100, the adopted side is red. Its repair does not explain 1000."""
    adopted, candidate = kernels(value, OLD), kernels(1000, NEW)
    assert (adopted.red, candidate.red) == (value != 100, False)
    assert first_finding(adopted, candidate) == (Decision.HOLD, "WORSE")


def test_value_of_another_build_repairs_a_red_adopted_side() -> None:
    assert first_finding(kernels(101, OLD), kernels(99, NEW)) == (Decision.ADOPT, "FIXED")


def test_acceptance_of_the_adopted_value_excuses_no_worse_one() -> None:
    entries = [accept(KERNELS, 120)]
    adopted, candidate = kernels(120, OLD, entries), kernels(1000, NEW, entries)
    assert (bool(adopted.accepted), bool(candidate.accepted)) == (True, False)
    assert first_finding(adopted, candidate) == (Decision.HOLD, "WORSE")
    entries = [accept(KERNELS, 1000)]
    assert first_finding(kernels(100, OLD, entries), kernels(1000, NEW, entries))[0] is Decision.ADOPT


def test_acceptance_of_adopted_code_excuses_no_spills() -> None:
    accepts = kernel_code.text(registers=210, spills=8, wgmma=64, programs_per_sm=2)
    worse = kernel_code.text(registers=255, spills=4000, wgmma=0, programs_per_sm=1)

    def made(value: str, triton: str) -> Judgement:
        row = Row(CODE, value, "counts", 1, "C6", better="code", test=COUNT_TEST)
        found = judge(row, BASELINE, failed_instruments={}, build={"torch": "2.13.0", "triton": triton})
        entries = accepted.of_lane([accept(CODE, accepts)], "cpu")
        return accepted.apply(found, BASELINE, entries, date(2026, 12, 1))

    assert first_finding(made(accepts, "3.7.1"), made(worse, "3.9.0")) == (Decision.HOLD, "WORSE")


@pytest.mark.parametrize("swap", [False, True])
def test_time_with_an_interval_on_one_side_is_of_another_kind(swap: bool) -> None:
    """The sessions need an interval on both sides, and the comparison of single readings one on neither."""

    def made(value: float, interval: tuple[float, float] | None) -> Judgement:
        row = Row(
            "throughput/a/seconds",
            value,
            "s",
            1,
            "C37",
            better="lower",
            tolerance=5.0,
            interval=interval,
            test=COUNT_TEST,
        )
        return Judgement(row, Verdict.PASS, "", tolerance=5.0)

    adopted, candidate = (made(1.0, None), made(9.0, (8.9, 9.1)))[:: -1 if swap else 1]
    assert timed_rows(record(adopted), record(candidate)) == {}
    assert first_finding(adopted, candidate) == (Decision.UNKNOWN, "OTHER KIND")


# A ratio to another implementation that becomes faster does not hold a candidate; the own time does.


OWN, RATIO = "kernels/scan/milliseconds", "kernels/scan/over_peer"
SPEED_TEST = "suites/kernels/test_speed.py::test_speed[cpu]"


def ratio(value: float, verdict: Verdict = Verdict.PASS, **fields: Any) -> Judgement:
    made = {"better": "lower", "tolerance": 0.1, "test": SPEED_TEST, "own": OWN} | fields
    return Judgement(Row(RATIO, value, "ratio", 3, "C37", **made), verdict, "", tolerance=0.1)


def own(value: float = 2.0, verdict: Verdict = Verdict.PASS) -> Judgement:
    row = Row(
        OWN, value, "ms", 3, "C37", better="lower", tolerance=0.1, interval=(value, value), test=SPEED_TEST
    )
    return Judgement(row, verdict, "")


def records(adopted: list[Judgement], candidate: list[Judgement]) -> tuple[Record, Record]:
    return Record({"lane": "cpu"}, tuple(adopted)), Record({"lane": "cpu"}, tuple(candidate))


def gate_of_ratios(adopted: list[Judgement], candidate: list[Judgement]) -> GateVerdict:
    sides = (Side(name, record) for name, record in zip(("torch 1", "torch 2"), records(adopted, candidate)))
    return judge_gate("cpu", *sides)


def ratio_labels(result: GateVerdict) -> list[tuple[Decision, str, tuple[str, ...]]]:
    return [(f.decision, f.label, f.rows) for f in result.findings]


WORSE = pytest.mark.parametrize(
    "worse", [ratio(1.5, Verdict.REGRESSION), ratio(1.2)], ids=["than reviewed", "than the adopted side"]
)


@WORSE
def test_faster_peer_is_shown_and_holds_nothing(worse: Judgement) -> None:
    adopted, candidate = [own(), ratio(1.0)], [own(), worse]
    assert ratio_labels(gate_of_ratios(adopted, candidate)) == [(Decision.ADOPT, PEER, (RATIO,))]
    assert timed_rows(*records(adopted, candidate)) == {OWN: SPEED_TEST}, (
        "sessions measure the own time alone"
    )


@WORSE
def test_ratio_alone_judges_without_the_own_time(worse: Judgement) -> None:
    """Of a side that does not report it, or if the row does not name it."""
    named = ratio_labels(gate_of_ratios([own(), ratio(1.0)], [worse]))
    assert (Decision.ADOPT, PEER, (RATIO,)) not in named
    bare = [replace(j, row=replace(j.row, own="")) for j in (ratio(1.0), worse)]
    assert gate_of_ratios([own(), bare[0]], [own(), bare[1]]).decision is not Decision.ADOPT


def test_own_row_that_is_no_time_excuses_nothing() -> None:
    """A count or a time without a direction judges no candidate."""
    for changes in (
        {"unit": "kernels", "interval": None},
        {"better": "exact", "tolerance": 0.0, "interval": None},
    ):
        other = replace(own(), row=replace(own().row, **changes))
        assert (
            gate_of_ratios([other, ratio(1.0)], [other, ratio(1.5, Verdict.REGRESSION)]).decision
            is Decision.HOLD
        )


def test_slower_own_time_still_holds() -> None:
    found = gate_of_ratios(
        [own(), ratio(1.0)], [own(3.0, Verdict.REGRESSION), ratio(1.5, Verdict.REGRESSION)]
    )
    assert (Decision.HOLD, "REGRESSION", (OWN,)) in ratio_labels(found)


@pytest.mark.parametrize(
    "broken",
    [ratio(float("nan"), Verdict.REGRESSION), ratio(1.5, Verdict.REGRESSION, at_most=1.0)],
    ids=["NaN", "beyond a derived bound"],
)
def test_no_number_and_a_bound_still_hold(broken: Judgement) -> None:
    assert gate_of_ratios([own(), ratio(1.0)], [own(), broken]).decision is not Decision.ADOPT


def test_better_ratio_and_equal_ratio_are_no_peers() -> None:
    assert ratio_labels(gate_of_ratios([own(), ratio(1.0)], [own(), ratio(1.04)])) == []
    assert ratio_labels(gate_of_ratios([own(), ratio(1.0)], [own(), ratio(0.5, Verdict.WIN)])) == [
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
    sides = [
        Side(name, Record({"lane": "cpu"}, (judged(P),), complete=whole, tests=tests))
        for name, whole, tests in (("a", True, CENSUS), ("b", complete, after))
    ]
    found = [f for f in judge_gate("cpu", *sides).findings if f.label == "MISSING"]
    assert [f.head for f in found] == ([f"tests that ran in the adopted set: {head}"] if head else [])
    for f in found:
        assert f.decision is (Decision.HOLD if complete else Decision.UNKNOWN)
        assert (f.tests, f.adopted) == (("a.py::test_op[mul]",), ("a.py::test_op[mul]: passed",))
        assert f.candidate == (f"a.py::test_op[mul]: {outcome or 'absent'}",)


def test_tests_whose_rows_are_missing_are_one_finding() -> None:
    adopted = Record({"lane": "cpu"}, (judged(P),), tests={judged(P).row.test: "passed"})
    found = judge_gate("cpu", Side("a", adopted), Side("b", Record({"lane": "cpu"}, ()))).findings
    assert [f.tests for f in found if f.label == "MISSING"] == [()]
