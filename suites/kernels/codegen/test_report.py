"""The report of the versions side by side says what differs, and nothing where nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.rows import Judgement, Row, Verdict, write_record
from suites.kernels.codegen.report import differences, lines, main, table
from suites.support.lanes import Lane, lanes

EQUAL = {"registers": 200, "spills": 0, "shared_memory_bytes": 1024, "wgmma": 8}


def judged(version: str, **values: int) -> list[Judgement]:
    ids = {
        f"kernels/op.kernel-N64-bf16-triton{version}/{metric}": v for metric, v in (EQUAL | values).items()
    }
    return [Judgement(Row(id, v, "count", 1, "C36"), Verdict.PASS, "") for id, v in ids.items()]


@lanes("cpu")
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"registers": 208, "shared_memory_bytes": 2048}, []),
        ({"registers": 191}, ["registers 200 on 3.7.1, 191 on 3.9.0"]),
        ({"spills": 8}, ["spills 0 on 3.7.1, 8 on 3.9.0"]),
        ({"wgmma": 7}, ["wgmma 8 on 3.7.1, 7 on 3.9.0"]),
    ],
)
def test_differences(lane: Lane, other: dict[str, int], said: list[str]) -> None:
    assert differences({"3.7.1": EQUAL, "3.9.0": EQUAL | other}) == said


@lanes("cpu")
def test_versions_side_by_side(lane: Lane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = {tmp_path / "a.json": judged("3.10.0"), tmp_path / "b.json": judged("3.9.0", spills=8)}
    for path, judgements in records.items():
        write_record(path, {}, judgements)
    assert main([str(path) for path in records]) == 0
    title, head, line, _, total = capsys.readouterr().out.splitlines()
    assert title == "registers / shared_memory_bytes / spills / wgmma"
    assert head.split() == ["kernel", "3.9.0", "3.10.0", "differs"]
    assert line.split()[:3] == ["op.kernel-N64-bf16", "200/1024/8/8", "200/1024/0/8"]
    assert line.endswith("spills 0 on 3.10.0, 8 on 3.9.0")
    assert total == "1 kernels, 2 versions, 1 kernels differ"


@lanes("cpu")
def test_a_kernel_that_one_version_lacks_is_said(lane: Lane) -> None:
    cases = table([("kernels/a-triton3.7.1/spills", 0), ("kernels/b-triton3.9.0/spills", 0)])
    assert [line.split("  ")[-1].strip() for line in lines(cases)][2:4] == ["not on 3.9.0", "not on 3.7.1"]


@lanes("cpu")
def test_nothing_to_report_is_said(lane: Lane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path / "empty.json", {}, [])
    for record, said in (("empty", "names a version of triton"), ("absent", "cannot be read")):
        assert main([str(tmp_path / f"{record}.json")]) == 4
        assert said in capsys.readouterr().err
