"""`bumpgate compare`: causes and versions that differ between two kept records."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import Verdict, write_record
from bumpgate.report.compare import markdown
from tests.support.reports import HERE, THERE, judged, row

P = Verdict.PASS


def test_causes_and_versions_of_two_records(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", HERE, [judged(P, row()), judged(P, row("a/b/c"))])
    write_record(
        tmp_path / "b.json", THERE, [judged(Verdict.REGRESSION, row(value=14)), judged(P, row("d/e/f"))]
    )
    text = markdown(tmp_path / "a.json", tmp_path / "b.json")
    assert "1 rows in both, 1 only before,\n1 only after." in text
    assert "| torch | 2.13.0+cpu | 2.14.0+cpu |" in text
    assert "| `compile/nam52-regional/graph_breaks` | 13 count | 14 count | +7.7 % |" in text
    assert "pytest -m" not in text, "no side of a comparison is installed"


def test_equal_records_have_no_cause(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", HERE, [judged(P, row())])
    text = markdown(tmp_path / "a.json", tmp_path / "a.json")
    assert "0 causes" in text.splitlines()[0]
    assert "No package differs." in text


def test_rows_with_one_cause_are_one_table(tmp_path: Path) -> None:
    """Heads that differ in numbers alone are one cause, and what a host measures of itself is another."""
    rows = [row(f"a/{n}/seconds", value=float(n), unit="s") for n in range(1, 4)]
    host = row("calibration/memory/copy", value=7.0)
    unreviewed = [judged(Verdict.INCONCLUSIVE, r, f"not reviewed: {r.value} s") for r in (*rows, host)]
    write_record(tmp_path / "a.json", HERE, [judged(P, row())])
    write_record(tmp_path / "b.json", HERE, [judged(P, row()), *unreviewed])
    text = markdown(tmp_path / "a.json", tmp_path / "b.json")
    assert "2 causes" in text.splitlines()[0]
    assert "HOST measured of the host, not of a build (1)" in text
    assert "not reviewed (3)" in text
    assert "| `a/2/seconds` | not measured | 2 s |  |" in text


def test_records_of_two_lanes_are_not_compared(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", HERE, [judged(P, row())])
    write_record(tmp_path / "b.json", HERE | {"lane": "h200"}, [judged(P, row())])
    with pytest.raises(BumpgateError, match=r"is of lane cpu, .* of h200: compare one lane"):
        markdown(tmp_path / "a.json", tmp_path / "b.json")
