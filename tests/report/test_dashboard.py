"""The static dashboard: rows, nights and hosts, changes of level and findings, as files without a network."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from bumpgate.core.rows import Value, Verdict, write_record
from bumpgate.history.archive import Archive, default_store
from bumpgate.report import dashboard
from bumpgate.report.dashboard import NightReading, Series
from tests.support.reports import (
    BREAKS,
    EVIL,
    HERE,
    ParsedPage,
    bumpgate,
    gate_of_day,
    judged,
    many_readings,
    row,
)

START = date(2026, 11, 1)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(dashboard, "today", lambda: date(2026, 11, 30))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return lambda *args: bumpgate(monkeypatch, "dashboard", str(tmp_path / "site"), *args)


def add_record(
    folder: Path, day: int, value: Value, hour: int = 2, verdict: Verdict = Verdict.PASS, **more: object
) -> None:
    path = folder / f"{len(list(folder.iterdir()))}.json"
    here = HERE | {"started": f"2026-11-{day:02d}T{hour:02d}:00:00+00:00"} | more
    write_record(path, here, [judged(verdict, row(BREAKS, value))])
    Archive(default_store()).add(path)


def series(*nights: tuple[int, Value, bool], levels: tuple[int, ...] = ()) -> Series:
    made = [NightReading(day, value, "RED" if red else "PASS", red) for day, value, red in nights]
    return Series("cpu", BREAKS, "Xeon", "count", made, list(levels))


def links(text: str) -> list[str]:
    """Return every address in a page."""
    return [value for name, value in ParsedPage(text).attributes if name in ("href", "src")]


def test_pages_show_rows_nights_hosts_changes_and_findings(
    tmp_path: Path, write: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(1, 7):
        add_record(tmp_path, day, 13 if day < 4 else 17, cpu="Xeon")
    add_record(tmp_path, 3, 99, hour=1, cpu="Xeon")  # the same night, read before
    add_record(tmp_path, 6, 13, verdict=Verdict.REGRESSION, cpu="EPYC")
    archive = Archive(default_store())
    archive.add(gate_of_day(tmp_path, 7))
    key = archive.findings()[0].key
    archive.mark(key, owner="ada", issue="https://example.org/1")
    assert write() == 0
    index = tmp_path / "site" / "index.html"
    assert capsys.readouterr().out == f"wrote {index}: 4 rows, 7 nights\n"
    text = index.read_text()
    assert "<h1>2 rows red, 1 open finding</h1>" in text
    assert text.index("<h2>Nights</h2>") < text.index("<h2>Findings</h2>"), "the chart is on the first screen"
    assert "2026-11-04</span> <a href=" in text
    assert re.search(r"13 &rarr; 17 count <span class=\"soft\">cpu, cpu, Xeon</span>", text)
    assert "99 " not in text
    for words in (key, "CHANGED graph_breaks", "owner ada", "cpu: cpu, EPYC", "1 red on 2026-11-06"):
        assert words in text
    own = [link for link in links(text) if not link.startswith(("data:", "https://example.org/1"))]
    assert len(own) == 5, "four rows and one change"
    assert all((index.parent / link).is_file() for link in own)
    page = next(p for p in index.parent.glob("rows/*.html") if "cpu: cpu, Xeon" in p.read_text()).read_text()
    assert "6 nights, 1 changes of level" in page
    assert "2026-11-06 back to 2026-11-04, 3 nights" in page
    assert page.count("new level") == 1
    assert page.count("h0") == 6, "one dot per night"
    assert links(page) == ["data:,", "../index.html"]


def test_dashboard_excludes_adopted_side_of_a_gate(tmp_path: Path, write: Callable[..., int]) -> None:
    Archive(default_store()).add(gate_of_day(tmp_path, 7, rows=(BREAKS,)))
    assert write() == 0
    text = (tmp_path / "site" / "index.html").read_text()
    assert '<td role="cell" class="number">17</td>' in text
    assert '<td role="cell" class="number">13</td>' not in text


def test_strip_marks_red_nights_and_gaps() -> None:
    drawn = dashboard.strip(series((0, 1, False), (1, 1, False), (2, 1, True), (5, 1, False)).nights, 6)
    for words in ('<path class="g" d="M0 4h2M5 4h1"/>', '<path class="r" d="M2 4h1"/>', "1 of 4 nights red"):
        assert words in drawn
    late = dashboard.strip(series(*((day, 1, False) for day in (2, 3, 4, 6))).nights, 8)
    assert 'd="M2 4h3M6 4h1"' in late


def test_spans_merge_equal_nights_and_keep_levels_apart() -> None:
    one = series((0, 1, False), (1, 1, False), (2, 1, True), (4, 2, True), (5, 2, True), levels=(3,))
    shown = [
        (s.first[-2:], s.last[-2:], s.nights, s.value, s.red, s.new) for s in dashboard.spans(one, START)
    ]
    assert shown == [
        ("05", "06", 2, 2, True, True),
        ("03", "03", 1, 1, True, False),
        ("01", "02", 2, 1, False, False),
    ]


def test_plot_needs_two_different_numbers_and_spans_its_box() -> None:
    for values in (("a", "b"), (1.0, float("nan")), (None, 1), (1,), (1, 1)):
        assert dashboard.plot(series(*((i, v, False) for i, v in enumerate(values))), START) == ""
    drawn = dashboard.plot(series((0, 5, False), (10, 15, True), levels=(1,)), START)
    assert '<path class="dot g" d="M8 228h0"/><path class="dot r" d="M992 12h0"/>' in drawn
    assert '<path class="level" d="M8 228H8M992 12H992"/>' in drawn


def test_dashboard_escapes_hostile_text(tmp_path: Path, write: Callable[..., int]) -> None:
    add_record(tmp_path, 1, EVIL, cpu=EVIL)
    add_record(tmp_path, 2, float("inf"), cpu=EVIL)
    assert write() == 0
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        assert text.count("<script") == (page.name == "index.html")
        assert "alert(&#39;x&#39;)" in text


def test_rewritten_dashboard_drops_removed_rows(tmp_path: Path, write: Callable[..., int]) -> None:
    add_record(tmp_path, 1, 1)
    add_record(tmp_path, 20, 1, cpu="EPYC")
    for options, pages in (((), 2), (("--days", "15"), 1)):
        assert write(*options) == 0
        assert len(list((tmp_path / "site" / "rows").iterdir())) == pages


def test_bad_dashboard_input_is_one_line(
    tmp_path: Path, write: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def error_line(*args: str) -> str:
        assert write(*args) == 4
        (line,) = capsys.readouterr().err.splitlines()
        return line

    add_record(tmp_path, 1, 1)
    assert "--store 'nonsense': not a database URL" in error_line("--store", "nonsense")
    for days in ("0", "800000", "99999999999"):
        assert "Invalid value for '--days'" in error_line("--days", days)
    site = tmp_path / "site"
    site.write_text("")
    assert error_line().endswith("site: not a folder")
    site.unlink()
    site.mkdir()
    (site / "index.html").write_text("<p>another page</p>")
    assert error_line().endswith("site: holds other files than a dashboard: name a new folder")
    assert (site / "index.html").read_text() == "<p>another page</p>"


def test_dashboard_without_a_reading_says_how_to_add_one(
    tmp_path: Path, write: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    add_record(tmp_path, 1, 1)
    assert write("--lane", "h200") == 0
    assert "no reading on lane h200 of the last 365 days in " in capsys.readouterr().out
    text = (tmp_path / "site" / "index.html").read_text()
    assert "No reading yet" in text
    assert "bumpgate history add FILE..." in text
    assert '<header class="open">' in text


def test_gaps_of_evidence_are_not_shown_as_red(tmp_path: Path, write: Callable[..., int]) -> None:
    add_record(tmp_path, 1, 13, verdict=Verdict.INCONCLUSIVE)
    assert write() == 0
    text = (tmp_path / "site" / "index.html").read_text()
    assert '<span class="pill open">INCONCLUSIVE' in text
    assert '<header class="good">' in text, "no row speaks against a build"


def test_first_page_size_depends_on_rows_not_on_nights(tmp_path: Path, write: Callable[..., int]) -> None:
    """The nights of a row are one drawing: at most 2 kB of the page each."""
    many_readings(Archive(default_store()), 60, 120, date(2026, 11, 30))
    assert write() == 0
    index = tmp_path / "site" / "index.html"
    assert index.stat().st_size < 20_000 + 60 * 2_000
    assert "and 0 earlier" not in index.read_text()
