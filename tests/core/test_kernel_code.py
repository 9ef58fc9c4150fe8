"""Rows of compiled code: one string per kernel, reviewed per triton version, and compared between sides of a bump."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate.bisect.probe import Cause, Reading, SuiteTest
from bumpgate.core import kernel_code
from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, judge, load, save
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Judgement, Record, Row, RowError, Verdict, write_record
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.review.rebaseline import diff, plan
from suites.kernels.codegen.conftest import reviewed_line

COUNTS = {"registers": 255, "spills": 140, "shared_memory": 1024, "wgmma": 8, "programs_per_sm": 4}
TEST = "suites/kernels/codegen/test_codegen.py::test_kernels[op-bf16-cpu]"
ID = "kernels/op.kernel-bf16/code"
REVIEWED = {"3.6.0": kernel_code.text(**COUNTS | {"spills": 136}), "3.7.1": kernel_code.text(**COUNTS)}


def row(id: str = ID, **changes: int) -> Row:
    return Row(id, kernel_code.text(**COUNTS | changes), "counts", 1, "C36", better="code", test=TEST)


def baseline(values: dict[str, str] = REVIEWED) -> Baseline:
    return Baseline("cpu", {}, {ID: Reviewed(None, "counts", "code", note="kept", test=TEST, values=values)})


def judged(made: Row, triton: str) -> Judgement:
    return judge(made, baseline(), failed_instruments={}, build={"torch": None, "triton": triton})


def record(triton: str, *rows: Row) -> Record:
    provenance = {"lane": "cpu", "triton": triton, "torch": "2.13.0"}
    return Record(provenance, tuple(judged(r, triton) for r in rows))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"registers": 168, "shared_memory": 4096}, {}),
        ({"spills": 139, "wgmma": 9, "programs_per_sm": 5}, {}),
        ({"spills": 141}, {"spills": "140 -> 141"}),
        ({"wgmma": 7}, {"wgmma": "8 -> 7"}),
        ({"programs_per_sm": 3}, {}),
        ({"programs_per_sm": 2}, {"programs_per_sm": "4 -> 2"}),
    ],
)
def test_worse_lists_worse_counts(changes: dict[str, int], expected: dict[str, str]) -> None:
    assert kernel_code.worse(COUNTS, COUNTS | changes) == expected
    assert kernel_code.worse({"wgmma": 8}, {"registers": 9}) == {"wgmma": "8 -> not read"}


@pytest.mark.parametrize("value", ["", "spills", "spills=-1", "spills=1  wgmma=2", 7, None, "spills=nan"])
def test_text_without_counts_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a list of counts"):
        kernel_code.parse(value)
    if value is not None:
        with pytest.raises(RowError, match="is not a list of counts"):
            Row(ID, value, "counts", 1, "C36", better="code")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("triton", "reviewed", "changes", "verdict", "reason"),
    [
        ("3.7.1", "3.7.1", {}, Verdict.PASS, ""),
        ("3.6.0", "3.6.0", {}, Verdict.CHANGED, "with triton 3.6.0"),
        ("3.7.1", "3.7.1", {"registers": 254}, Verdict.CHANGED, "with triton 3.7.1"),
        ("3.10.0", "3.7.1", {"registers": 254}, Verdict.PASS, "3.10.0 is not reviewed, compared with 3.7.1"),
        ("3.10.0", "3.7.1", {"spills": 400}, Verdict.REGRESSION, "with 3.7.1: spills 140 -> 400"),
        ("3.7.0", "3.6.0", {}, Verdict.REGRESSION, "with 3.6.0: spills 136 -> 140"),
        ("3.5.0", "3.6.0", {}, Verdict.REGRESSION, "with 3.6.0: spills 136 -> 140"),
    ],
)
def test_code_row_is_judged_by_nearest_reviewed_triton(
    triton: str, reviewed: str, changes: dict[str, int], verdict: Verdict, reason: str
) -> None:
    """Judged against the reviewed code of this triton, or of the nearest reviewed version."""
    found = judged(row(**changes), triton)
    assert found.verdict is verdict
    assert reason in found.reason
    assert found.reviewed == REVIEWED[reviewed]


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("3.10.2", "3.10.0"), ("3.9.1", "3.9.0"), ("3.11.0", "3.10.0"), ("2.0.0", "3.6.0")],
)
def test_nearest_version_is_found_by_its_numbers(version: str, nearest: str) -> None:
    assert kernel_code.nearest(version, ["3.10.0", "3.6.0", "3.9.0"]) == nearest


def test_baseline_file_keeps_one_value_per_version(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    save(path, baseline({"3.10.0": "spills=1", "3.9.0": "spills=2"}))
    assert load(path, "cpu") == baseline({"3.9.0": "spills=2", "3.10.0": "spills=1"})
    assert '{"values": {"3.9.0": "spills=2", "3.10.0": "spills=1"}, "unit"' in path.read_text()
    save(path, baseline())
    assert load(path, "cpu") == baseline()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('{"3.7.1": "spills=1"}', "{}", "values must map versions"),
        ('"spills=1"', '"spilled"', "triton 3.7.1: 'spilled' is not a list"),
        ('"code"', '"exact"', "and required there"),
        ('"values": {"3.7.1": "spills=1"}', '"value": "spills=1"', "are for rows whose better is"),
    ],
)
def test_broken_values_are_one_line(old: str, new: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    save(path, baseline({"3.7.1": "spills=1"}))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BaselineError, match=fault):
        load(path, "cpu")


def test_rebaseline_adds_and_replaces_one_version() -> None:
    """A version whose code is not worse is added as well. Reviews of other versions are kept."""
    old = baseline()
    for triton, changes, why in (("3.9.0", {}, "new triton"), ("3.7.1", {"registers": 254}, "changed")):
        made = row(**changes)
        new, (change,) = plan(record(triton, made), old)
        assert (change.why, new.rows[ID].note) == (why, "kept")
        assert new.rows[ID].values == REVIEWED | {triton: made.value}
        assert f"-> triton {triton}: registers=" in diff(old, new, [change])
        assert plan(record(triton, made), new) == (new, [])


OTHER = "kernels/op.fused-bf16/code"


def two_kernels() -> Baseline:
    """The baseline of an op that launches another kernel from triton 3.9.0 on."""
    first = baseline()
    later = replace(first.rows[ID], values={"3.9.0": kernel_code.text(**COUNTS)})
    return replace(first, rows={ID: first.rows[ID], OTHER: later})


@pytest.mark.parametrize(
    ("triton", "unexpected"),
    [("3.5.0", {OTHER}), ("3.7.1", {OTHER}), ("3.8.0", {OTHER}), ("3.9.0", {ID}), ("3.10.0", {ID})],
)
def test_kernels_of_other_versions_are_not_expected(triton: str, unexpected: set[str]) -> None:
    assert two_kernels().unexpected(triton) == unexpected


def test_review_of_another_test_leaves_a_kernel_expected() -> None:
    """A version that was reviewed in part excuses no kernel of the rest."""
    both = two_kernels()
    moved = replace(both.rows[OTHER], test=TEST.replace("op-", "other-"))
    assert replace(both, rows=both.rows | {OTHER: moved}).unexpected("3.9.0") == set()


@pytest.mark.parametrize(
    ("triton", "verdict", "reason"),
    [
        ("3.9.0", Verdict.NEW, "not reviewed with triton 3.9.0"),
        ("3.10.0", Verdict.PASS, "triton 3.10.0 is not reviewed, compared with 3.7.1"),
    ],
)
def test_kernel_new_to_a_reviewed_version_is_not_reviewed(triton: str, verdict: Verdict, reason: str) -> None:
    found = judge(row(), two_kernels(), failed_instruments={}, build={"torch": None, "triton": triton})
    assert (found.verdict, found.reason.partition(":")[0]) == (verdict, reason)


def test_rebaseline_drops_the_value_of_one_version() -> None:
    """--prune with a record of the tier: a row without any value left is dropped."""
    lost = Judgement(Row(ID, None, "counts", 0, "", better="code", test=TEST), Verdict.MISSING, "", gone=True)
    old = baseline()
    for triton, left in (("3.7.1", {"3.6.0": REVIEWED["3.6.0"]}), ("3.6.0", {})):
        record = Record({"lane": "cpu", "triton": triton}, (lost,), True)
        assert not plan(record, old)[1]
        old, (change,) = plan(record, old, prune=True)
        assert (dict(old.rows[ID].values) if left else old.rows) == left
        assert ("not launched" in diff(baseline(), old, [change])) == bool(left)


def test_gate_lists_kernels_of_one_side() -> None:
    """Each side reports what its own triton launches, and lists the rest as not run."""
    ids = {"3.7.1": OTHER, "3.9.0": ID}
    sides = []
    for triton, absent in ids.items():
        made = judge(
            row(OTHER if absent == ID else ID), two_kernels(), failed_instruments={}, build={"triton": triton}
        )
        lines = [f"{absent}: triton {triton} does not launch this kernel"]
        sides.append(Side(triton, Record({"lane": "cpu", "triton": triton, "not_run": lines}, (made,), True)))
    found = judge_gate("cpu", *sides)
    assert found.decision is Decision.ADOPT
    assert {(f.label, f.rows) for f in found.findings} == {("NEW", (OTHER,)), ("NOT RUN", (ID,))}


def gate(good: tuple[str, Row], bad: tuple[str, Row]) -> list[tuple[Any, ...]]:
    sides = [Side(triton, record(triton, made)) for triton, made in (good, bad)]
    return [(f.decision, f.label, f.head) for f in judge_gate("cpu", *sides).findings]


def test_gate_compares_code_of_the_sides() -> None:
    """Each side may match its own review: 400 bytes are still more than 140."""
    good = ("3.7.1", row())
    assert gate(good, ("3.10.0", row(spills=400))) == [(Decision.HOLD, "WORSE", "spills")]
    assert gate(good, ("3.6.0", row(wgmma=7))) == [(Decision.HOLD, "WORSE", "wgmma")]
    assert gate(good, ("3.10.0", row(registers=128))) == []
    assert gate(("3.10.0", row(spills=400)), good) == [(Decision.ADOPT, "WIN", "")]


def test_gate_groups_kernels_with_the_same_loss() -> None:
    ids = [f"kernels/op.kernel{n}-bf16/code" for n in range(3)]
    good = Side("a", record("3.7.1", *(row(id) for id in ids)))
    bad = Side("b", record("3.9.0", *(row(id, spills=200 + n) for n, id in enumerate(ids))))
    (finding,) = judge_gate("cpu", good, bad).findings
    assert (finding.metric, finding.head, finding.rows) == ("code", "spills", tuple(ids))


def test_gate_without_the_kernel_on_one_side_is_unknown() -> None:
    good, none = Side("a", record("3.7.1", row())), Side("b", Record({"lane": "cpu"}, ()))
    assert judge_gate("cpu", good, none).decision is Decision.UNKNOWN


@pytest.mark.parametrize(
    ("triton", "line"),
    [
        ("3.7.1", "codegen: triton 3.7.1, reviewed: 3.6.0, 3.7.1"),
        ("3.8.0", "codegen: triton 3.8.0 is not reviewed; its code is compared with that of triton 3.7.1"),
    ],
)
def test_header_names_the_reviewed_triton(triton: str, line: str) -> None:
    assert reviewed_line(baseline(), triton) == line


def test_bisect_finds_the_version_that_spills(tmp_path: Path) -> None:
    """Every reading is green by its own review, as with triton 3.7.1 and 3.9.0."""

    def reading(triton: str, **changes: int) -> Reading:
        place = tmp_path / triton
        place.mkdir()
        made = row(**changes)
        write_record(place / "record.json", {"lane": "cpu"}, [Judgement(made, Verdict.PASS, "")])
        return Reading(place, Cause.RAN, 0)

    good, same, bad = reading("3.6.0"), reading("3.7.1", registers=200), reading("3.9.0", spills=400)
    test = SuiteTest(Path(), "cpu", (), "triton")
    test.learn([good], [bad])
    assert test.deciding == (ID,)
    assert [test.judge(r).outcome.value for r in (good, same, bad)] == ["GOOD", "GOOD", "BAD"]
    unreviewed = reading("3.8.0", spills=139)
    reviews = replace(judged(row(spills=139), "3.8.0"), verdict=Verdict.REGRESSION)
    write_record(unreviewed.place / "record.json", {"lane": "cpu"}, [reviews])
    assert test.judge(unreviewed).outcome.value == "GOOD", "compared with the good end, not with a review"
