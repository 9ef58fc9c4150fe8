"""The findings of recorded gates, each labelled by hand: would a person hold the bump for it?

The changes are of libtpu 0.0.52 against 0.0.51, of torch 2.15.0 against 2.11.0 on an H200, and of torch 2.14.1 and
2.15.0 of PyPI against 2.13.0+cpu (docs/results.md). Where only the percentage was recorded, the values are made up. An
`example` was in no recorded gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, Value, Verdict
from bumpgate.gate.environments import same_variant
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.materiality import KINDS, allowed, kind_of, plausible, variants
from bumpgate.gate.sequential import Timed
from bumpgate.gate.state import NAME
from bumpgate.gate.verdict import GateVerdict, Side, judge_gate
from tests.support.gating import COUNT_TEST, Machine

LOWER = {"better": "lower"}
CPU, CUDA, NEWER_CUDA = "2.13.0+cpu", "2.15.0+cu132", "2.16.0+cu140"


def row(id: str, value: Value, unit: str, **fields: Any) -> Row:
    return Row(
        **{"id": id, "value": value, "unit": unit, "witness": 1, "rule": "C1", "test": "a.py"} | fields
    )


def judged(
    before: Row, after: Row, verdict: Verdict = Verdict.PASS, torch: tuple[str, str] = (CPU, CPU)
) -> GateVerdict:
    sides = [
        Side(version, Record({"lane": "cpu", "torch": version}, (Judgement(made, how, ""),)))
        for version, made, how in zip(torch, (before, after), (Verdict.PASS, verdict))
    ]
    return judge_gate("cpu", *sides)


V6E, PER_BUILD = LOWER | {"tolerance": 0.02}, {"per_build": True}
DERIVED = {"better": "derived", "at_most": 1e-4}
# gate and row: unit, values, fields, whether a person holds the bump for it, why.
LABELLED = {
    "0.0.52 aot/a/fusions": ("count", 1629, 1631, V6E, False, "+0.1 %, and its bytes and times are rows"),
    "0.0.52 aot/a/temporary_bytes": ("bytes", 11157504, 11255808, V6E, False, "+0.9 %, within the row's tolerance"),
    "0.0.52 aot/b/temporary_bytes": ("bytes", 4292608, 4472832, V6E, True, "+4.2 %"),
    "0.0.52 aot/a/instructions": ("count", 26409, 26013, V6E, False, "1.5 % fewer"),
    "0.0.52 aot/b/instructions": ("count", 26409, 25722, V6E, False, "2.6 % fewer"),
    "0.0.52 aot/a/code_bytes": ("bytes", 1000000, 1019000, LOWER, False, "+1.9 % of code"),
    "0.0.52 aot/b/code_bytes": ("bytes", 1000000, 1058000, LOWER, False, "+5.8 % of code"),
    "2.15.0 compile/nam12/guard_count": ("count", 298, 337, LOWER, True, "+13 %: each step checks more"),
    "2.15.0 cache/autotune/accidents_remembered": ("candidates", 1, 2, PER_BUILD, True, "a bad choice is kept"),
    "2.15.0 compile/cpu/guard_count": ("count", 332, 336, LOWER, False, "+1.2 %"),
    "2.15.0 throughput/a/generated_kernels": ("count", 200, 202, PER_BUILD, False, "2 of 200 kernels"),
    "2.15.0 release/torchscript/category": ("text", "DeprecationWarning", "FutureWarning", {}, True, "a fact"),
    "example compile/a/generated_modules": ("count", 8, 9, {}, True, "another module is compiled"),
    "example h200/a/kernels_per_step": ("count", 582, 583, LOWER, False, "one launch of 582"),
    "example h200/b/kernels_per_step": ("count", 582, 600, LOWER, True, "+3 % of launches"),
    "2.15.0 h200/a/peak_memory_bytes": ("bytes", 27421579264, 27429805737, LOWER, False, "+0.03 %: the allocator"),
    "example h200/b/peak_memory_bytes": ("bytes", 27421579264, 28518442434, LOWER, True, "+4 %"),
    "example numerics/a/gradient_error": ("ratio", 1e-5, 2.1e-5, DERIVED, True, "twice the error"),
    "example compile/a/graph_breaks": ("count", 1, 2, {}, True, "a break"),
    "example compile/a/host_syncs": ("count", 0, 1, LOWER, True, "the first one"),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("reviewed", [False, True], ids=["within its tolerance", "other than reviewed"])
def test_finding_of_a_recorded_gate_holds_if_it_is_material(name: str, reviewed: bool) -> None:
    """A small change also holds nothing where the candidate's record calls it CHANGED against the baseline."""
    unit, before, after, fields, material, why = LABELLED[name]
    rows = [row(name.split()[1], value, unit, **fields) for value in (before, after)]
    judged_alone = fields.get("better") == "derived" or fields.get("per_build")
    found = judged(*rows, Verdict.CHANGED if reviewed and not judged_alone else Verdict.PASS)
    worse = after != before and (material or reviewed or after > before)
    assert (found.decision is Decision.HOLD) is material, why
    if not material and worse:
        assert {f.label for f in found.findings} <= {"CHANGED", "WIN"}
        assert found.findings, "a change is listed"


START = "throughput/start-cpu"
TIMES = {
    f"{START}/import_cpu_seconds 1.28": (CPU, CUDA, Decision.ADOPT, "more libraries are loaded"),
    f"{START}/warm_cpu_seconds 1.33": (CPU, CUDA, Decision.ADOPT, "cache keys hash triton's files"),
    f"{START}/warm_peak_memory_bytes 1.85": (CPU, CUDA, Decision.ADOPT, "more modules are loaded"),
    f"{START}/cold_peak_memory_bytes 1.68": (CPU, CUDA, Decision.ADOPT, "more modules are loaded"),
    f"{START}/cold_inductor_cpu_seconds 1.33": (CPU, CUDA, Decision.HOLD, "the compiler itself is slower"),
    f"{START}/import_cpu_seconds 1.281": (CPU, "2.15.0+cpu", Decision.HOLD, "one variant"),
    f"{START}/warm_cpu_seconds 1.331": (
        CUDA,
        NEWER_CUDA,
        Decision.HOLD,
        "a newer CUDA is a part of the bump",
    ),
    f"{START}/cold_cpu_seconds 1.03": (CPU, "2.15.0+cpu", Decision.ADOPT, "+3 % of a start"),
    "kernels/attention/forward_milliseconds 1.026": (CUDA, NEWER_CUDA, Decision.HOLD, "+2.6 % of a kernel"),
    "throughput/nam52/seconds 1.05": (CPU, CUDA, Decision.HOLD, "+5 % of a step"),
}


@pytest.mark.parametrize("name", TIMES)
def test_slower_time_of_a_recorded_gate_holds_if_it_is_material(name: str) -> None:
    id, ratio = name.split()
    *torch, decision, why = TIMES[name]
    made = row(id, 1.0, "bytes" if id.endswith("bytes") else "s", better="lower", paired=True)
    record = [Record({"lane": "cpu", "torch": t}, (Judgement(made, Verdict.PASS, ""),)) for t in torch]
    timed = {
        id: Timed(TimedOutcome.SLOWER, float(ratio), (float(ratio) - 0.01, float(ratio) + 0.01), 16, 0.001)
    }
    found = judge_gate("cpu", Side("a", record[0]), Side("b", record[1]), timed)
    assert found.decision is decision, why
    assert len(found.findings) == 1, "it is listed"


@pytest.mark.parametrize(
    ("after", "decision"), [(300, Decision.ADOPT), (131, Decision.HOLD), (0, Decision.HOLD)]
)
def test_count_that_falls_too_far_to_be_a_gain_holds(after: int, decision: Decision) -> None:
    before, now = (row("compile/nam52/guard_count", value, "count", **LOWER) for value in (332, after))
    found = judged(before, now, Verdict.CHANGED)
    assert (found.decision, found.findings[0].label) == (decision, "CHANGED")


@pytest.mark.parametrize("tolerance", [0.0, 0.005, 0.05, 0.5])
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_no_kind_allows_less_than_the_tolerance_of_the_row(tolerance: float, better: str) -> None:
    for metric, unit in (("fusions", "count"), ("peak_bytes", "bytes"), ("anything", "count")):
        made = row(f"a/b/{metric}", 100, unit, better=better, tolerance=tolerance)
        factor, _ = allowed(made)
        assert factor >= kind_of(made).factor
        change = 0.999 * tolerance
        within = 100 * (1 - change) if better == "higher" else 100 * (1 + change)
        found = judged(made, row(f"a/b/{metric}", within, unit, better=better, tolerance=tolerance))
        assert found.decision is Decision.ADOPT


def test_each_kind_has_a_reason_and_a_margin() -> None:
    assert all(kind.reason and 1 < kind.factor <= 1.25 for kind in KINDS)


@pytest.mark.parametrize(
    ("requirement", "adopted", "first"),
    [
        ("torch==2.15.0", "2.13.0+cpu", ["torch==2.15.0+cpu"]),
        ("torch == 2.15.0", "2.13.0+cpu", ["torch==2.15.0+cpu"]),
        ("torch==2.15.0+cu132", "2.13.0+cpu", []),
        ("torch==2.15.0", "2.13.0+cu130", []),
        ("torch==2.15.0", "2.13.0", []),
        ("torch>=2.15", "2.13.0+cpu", []),
        ("triton==3.9.0", "2.13.0+cpu", []),
    ],
)
def test_candidate_is_requested_in_the_adopted_variant_first(
    requirement: str, adopted: str, first: list[str]
) -> None:
    assert same_variant(requirement, adopted) == first


@pytest.mark.parametrize(
    ("adopted", "candidate", "labels"),
    [
        (CPU, CUDA, ["cpu", "cu132"]),
        (CPU, CPU, []),
        (CPU, "2.15.0", []),
        ("2.9.0a0+git21fec65", CUDA, []),
    ],
)
def test_variants_are_builds_for_devices(adopted: str, candidate: str, labels: list[str]) -> None:
    """A commit in a label is none."""
    assert variants(adopted, candidate) == labels


@pytest.mark.parametrize(("after", "believed"), [(80, True), (125, True), (79, False), (126, False)])
def test_gain_is_believed_within_a_quarter(after: int, believed: bool) -> None:
    """An instrument may lose a part of a count, or count twice."""
    assert plausible(row("a/b/n", 100, "count"), row("a/b/n", after, "count")) is believed


@pytest.mark.parametrize(
    ("oldest", "decision"), [(1600, Decision.HOLD), (1625, Decision.ADOPT), (1700, Decision.HOLD)]
)
def test_small_changes_add_up(machine: Machine, out: Path, oldest: int, decision: Decision) -> None:
    """1629 -> 1640 fusions hold nothing, unless the history shows that they were 1600."""
    for side, value in (("adopted", 1629), ("candidate", 1640)):
        made = row("compile/a/fusions", value, "count", test=COUNT_TEST)
        machine.plant(side, counts=[Judgement(made, Verdict.PASS, "")])
    machine.oldest = {"compile/a/fusions": oldest}
    gate = machine.gate(out)
    assert gate.decision is decision
    assert ("CREEP" in {f.label for f in gate.findings}) is (decision is Decision.HOLD)
    assert read_judged(out / NAME).decision is decision
