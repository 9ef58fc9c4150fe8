"""The tax table: two rows per line, their ratio, and only measured numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.rows import ROW_ID, Judgement, Row, Verdict, read_record, write_record
from tests.support.reports import HERE, judged, row
from tests.support.tree import ROOT
from tools import tax

SLOW, FAST = (
    "throughput/a-full-slow-2x4096/tokens_per_second",
    "throughput/a-full-fast-2x4096/tokens_per_second",
)
BOTH = "throughput/a-full/slow_over_fast"
LINE = tax.Line("breaks", SLOW, FAST, "24 %")
HEAD_LINES = 2
IDS = {id for line in tax.LINES for id in (line.first, line.second, line.ratio) if id}


def timed(
    id: str, value: float, low: float, high: float, verdict: Verdict = Verdict.PASS, **fields
) -> Judgement:
    made = {"unit": "tokens/s", "better": "higher", "tolerance": 0.06, "interval": (low, high)}
    return judged(verdict, row(id, value, **made | fields))


MADE = (timed(SLOW, 80.0, 79.0, 81.0), timed(FAST, 100.0, 98.0, 102.0))


def cells(tmp_path: Path, judgements: tuple[Judgement, ...], line: tax.Line = LINE) -> list[str]:
    """Return the cells of the one line for a record of these rows."""
    path = tmp_path / "record.json"
    write_record(path, HERE, judgements)
    lines = tax.markdown([read_record(path)], [line]).splitlines()
    table = [text for text in lines if text.startswith("|")]
    return [cell.strip() for cell in table[HEAD_LINES].strip("|").split(" | ")]


def test_line_has_rows_values_ratio_and_claim(tmp_path: Path) -> None:
    assert cells(tmp_path, MADE) == [
        "breaks",
        f"`{SLOW}`: 80 tokens/s",
        f"`{FAST}`: 100 tokens/s",
        f"0.800 ({79 / 102:.3f} to {81 / 98:.3f})",
        "24 %",
    ]


def test_ratio_of_a_row_without_interval_has_no_interval(tmp_path: Path) -> None:
    plain = judged(Verdict.PASS, row(FAST, 100, unit="tokens/s"))
    assert cells(tmp_path, (MADE[0], plain))[3] == "0.800"


def test_line_includes_red_rows(tmp_path: Path) -> None:
    for verdict in (Verdict.REGRESSION, Verdict.WIN, Verdict.CHANGED, Verdict.MISSING):
        slow = replace(MADE[0], verdict=verdict)
        assert cells(tmp_path, (slow, MADE[1]))[3].startswith("0.800"), verdict


@pytest.mark.parametrize(
    "fast",
    [
        None,
        timed(FAST, 100.0, 98.0, 102.0, Verdict.INSTRUMENT),
        timed(FAST, 100.0, 98.0, 102.0, Verdict.INFRA),
        timed(FAST, 100.0, 98.0, 102.0, witness=0),
        timed(FAST, float("nan"), 98.0, 102.0),
        judged(Verdict.MISSING, Row(FAST, None, "tokens/s", 0, "", better="derived")),
        judged(Verdict.PASS, row(FAST, 0, unit="tokens/s")),
        judged(Verdict.PASS, row(FAST, "100", unit="tokens/s")),
    ],
)
def test_unmeasured_row_has_no_number(tmp_path: Path, fast: Judgement | None) -> None:
    judgements = (MADE[0],) if fast is None else (MADE[0], fast)
    _, slow, absent, ratio, _ = cells(tmp_path, judgements)
    assert slow == f"`{SLOW}`: 80 tokens/s"
    assert (absent, ratio) == (f"`{FAST}`: {tax.NOT_MEASURED}", tax.NOT_MEASURED)
    assert not re.search(r"\d", ratio)


def test_rows_of_different_units_have_no_ratio(tmp_path: Path) -> None:
    other = judged(Verdict.PASS, row(FAST, 100, unit="tokens/ms"))
    assert cells(tmp_path, (MADE[0], other))[3] == tax.NOT_MEASURED


def test_measured_ratio_replaces_the_quotient(tmp_path: Path) -> None:
    """Not the quotient of its two rows: without it, they may be from other processes or have another meaning."""
    line = LINE._replace(ratio=BOTH)
    together = judged(Verdict.PASS, row(BOTH, 0.5, unit="ratio"))
    assert cells(tmp_path, (*MADE, together), line)[3] == f"0.500 (`{BOTH}`)"
    assert cells(tmp_path, MADE, line)[3] == tax.NOT_MEASURED
    assert cells(tmp_path, (together,), line)[1:4] == [
        f"`{SLOW}`: {tax.NOT_MEASURED}",
        f"`{FAST}`: {tax.NOT_MEASURED}",
        f"0.500 (`{BOTH}`)",
    ]


def test_first_record_has_precedence_over_later_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_record(first, HERE, [MADE[0]])
    write_record(second, HERE | {"lane": "other"}, [timed(SLOW, 1.0, 1.0, 1.0), MADE[1]], complete=False)
    text = tax.markdown([read_record(first), read_record(second)], [LINE])
    assert "80 tokens/s" in text
    assert "0.800" in text
    assert "1 of 1 lines measured" in text
    assert "lane cpu on cpu: torch 2.13.0+cpu" in text
    assert re.search(r"lane other .*the run was cut short", text)


def test_tax_command_prints_or_writes(tmp_path: Path, capsys) -> None:
    record, out = tmp_path / "record.json", tmp_path / "tax.md"
    write_record(record, HERE, MADE)
    assert tax.main([str(record)]) == 0
    printed = capsys.readouterr().out
    assert f"0 of {len(tax.LINES)} lines measured" in printed
    assert printed.count("\n|") == HEAD_LINES + len(tax.LINES)
    assert tax.main([str(record), "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert capsys.readouterr().out == ""


def test_tax_bad_input_prints_one_line(tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.json"
    assert tax.main([str(record)]) == 2
    write_record(record, HERE, MADE)
    assert tax.main([str(record), "--out", str(tmp_path / "nowhere" / "tax.md")]) == 2
    missing, nowhere = capsys.readouterr().err.splitlines()
    assert missing.startswith("record.json: cannot be read")
    assert nowhere.endswith("name a file in a directory that can be written")


def test_table_ids_are_valid_row_ids() -> None:
    assert all(ROW_ID.fullmatch(id) for id in IDS), IDS


def reported(metric: str) -> bool:
    """Whether a test of the suites names this metric at the end of a row id."""
    sources = [
        p for folder in ("throughput", "compile") for p in (ROOT / "suites" / folder).glob("test_*.py")
    ]
    made = re.compile(rf"/(?:\{{\w+\}}_)?{re.escape(metric)}\"")
    return any(made.search(path.read_text()) for path in sources)


@pytest.mark.parametrize("metric", sorted({id.split("/")[2] for id in IDS}))
def test_each_metric_of_the_table_is_measured_by_a_test(metric: str) -> None:
    """Checked by metric: the ids of the full-size rows are composed by their tests."""
    suffixes = (metric, metric.partition("_")[2])
    assert any(map(reported, suffixes)), f"no test reports {metric}"


def test_reported_is_false_for_an_unmeasured_metric() -> None:
    assert reported("peak_memory_bytes")
    assert not reported("tokens_per_fortnight")
