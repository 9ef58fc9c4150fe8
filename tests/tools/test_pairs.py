"""Pairs of records of one build, judged as a gate judges the rows that it reads once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.rows import BumpgateError, Judgement, Row, Verdict, write_record
from tools.pairs import main, same_build


def written(path: Path, kernels: int, torch: str = "2.13.0", *, complete: bool = True) -> str:
    row = Row("a/b/kernels", kernels, "count", 1, "C37", test="t.py::test")
    write_record(path, {"lane": "cpu", "torch": torch}, [Judgement(row, Verdict.PASS, "")], complete=complete)
    return str(path)


def test_pairs_are_judged_in_both_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = [written(tmp_path / f"{n}.json", 200) for n in range(2)]
    main(equal)
    assert "| 2 | 2 | 0 [0.0%, 65.8%] | 0 [0.0%, 65.8%] | 2 [34.2%, 100.0%] | 0 |" in capsys.readouterr().out
    main([*equal, written(tmp_path / "other.json", 201)])
    printed = capsys.readouterr()
    assert "| 3 | 6 | 4 [" in printed.out
    assert printed.err == "4 pairs: CHANGED a/b/kernels\n"


@pytest.mark.parametrize(
    ("torch", "complete", "why"), [("2.14.0", True, "another torch"), ("2.13.0", False, "cut short")]
)
def test_records_that_do_not_compare_are_refused(
    torch: str, complete: bool, why: str, tmp_path: Path
) -> None:
    paths = [
        written(tmp_path / "a.json", 200),
        written(tmp_path / "b.json", 200, torch, complete=complete),
    ]
    with pytest.raises(BumpgateError, match=why):
        same_build(paths)
