"""The report that compares versions: it lists what is worse in a version, and nothing otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core import kernel_code
from bumpgate.core.rows import Judgement, Row, Verdict, write_record
from suites.kernels.codegen.report import lines, losses, main, table
from suites.support.lanes import Lane, lanes

COUNTS = {"registers": 200, "spills": 0, "shared_memory": 1024, "wgmma": 8, "programs_per_sm": 4}


def judged(**changes: int) -> list[Judgement]:
    value = kernel_code.text(**COUNTS | changes)
    made = Row("kernels/op.kernel-N64-bf16/code", value, "counts", 1, "C36", better="code")
    return [Judgement(made, Verdict.PASS, "")]


@lanes("cpu")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"registers": 255, "shared_memory": 2048}, []),
        ({"programs_per_sm": 3}, []),
        ({"programs_per_sm": 2}, ["3.9.0: programs_per_sm 4 -> 2"]),
        ({"spills": 8}, ["3.9.0: spills 0 -> 8"]),
        ({"wgmma": 7}, ["3.9.0: wgmma 8 -> 7"]),
        ({"wgmma": 9}, []),
    ],
)
def test_code_losses_between_versions(lane: Lane, changes: dict[str, int], expected: list[str]) -> None:
    assert losses({"3.7.1": COUNTS, "3.9.0": COUNTS | changes}) == expected


@lanes("cpu")
def test_report_shows_versions_side_by_side(
    lane: Lane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"3.10.0": judged(spills=8), "3.9.0": judged()}
    for version, judgements in records.items():
        write_record(tmp_path / f"{version}.json", {"triton": version}, judgements)
    assert main([str(tmp_path / f"{version}.json") for version in records]) == 0
    title, head, line, _, total = capsys.readouterr().out.splitlines()
    assert title == "registers / spills / shared_memory / wgmma / programs_per_sm"
    assert head.split() == ["kernel", "3.9.0", "3.10.0", "worse"]
    assert line.split()[:3] == ["op.kernel-N64-bf16", "200/0/1024/8/4", "200/8/1024/8/4"]
    assert line.endswith("3.10.0: spills 0 -> 8")
    assert total == "1 kernels, 2 versions, 1 kernels worse"


@lanes("cpu")
def test_report_of_kernel_missing_in_one_version(lane: Lane) -> None:
    cases = table([("kernels/a/code", "3.7.1", "spills=0"), ("kernels/b/code", "3.9.0", "spills=0")])
    assert [line.split("  ")[-1].strip() for line in lines(cases)][2:4] == ["not on 3.9.0", "not on 3.7.1"]


@lanes("cpu")
def test_report_of_records_without_code_rows(
    lane: Lane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "empty.json", {}, [])
    for record, message in (("empty", "no row of compiled code"), ("absent", "cannot be read")):
        assert main([str(tmp_path / f"{record}.json")]) == 4
        assert message in capsys.readouterr().err
