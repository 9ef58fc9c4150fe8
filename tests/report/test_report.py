"""The report of a record or a gate in HTML, JUnit XML and Markdown, with any content."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bumpgate.core import gate_file
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record, RecordError, Verdict, write_record
from bumpgate.gate.options import GateConfig
from bumpgate.gate.state import Gate, SideState
from bumpgate.gate.verdict import Side
from bumpgate.report import command as report
from bumpgate.report import diffs, markdown, page
from bumpgate.report.html_page import html_page
from tests.support.reports import (
    EVIL,
    HERE,
    TEST,
    ParsedPage,
    bumpgate,
    held,
    judged,
    record,
    row,
    write_gate,
)

P = Verdict.PASS


def seen(shown: page.Page) -> ParsedPage:
    return ParsedPage(html_page(shown))


def test_gate_page_shows_both_sides(tmp_path: Path) -> None:
    shown = page.of(gate_file.read(held(tmp_path)))
    assert (shown.word, shown.tone, shown.failed) == ("HOLD", "bad", True)
    text = seen(shown).text
    for words in (
        "break x1: GB0098 at model/hybrid.py:66",
        "break x1: GB0098 at model/hybrid.py:71",
        "+6.1 % in [+5.1 %, +7.1 %] after 16 sessions",
        "canary graphs:",
        "accepted by ada, until 2026-12-31",
        "SLOWER in [1.051, 1.071] after 16 sessions",
        "model/nam12-corpus/loss_after_200_steps",
        "2.14.0+cpu",
    ):
        assert words in text, words
    assert shown.compare.endswith(f"compare/{'c' * 40}...{'d' * 40}")
    order = [r.label for r in shown.rows]
    changed = shown.rows[order.index("CHANGED")]
    assert (changed.adopted, changed.candidate) == ("13", "17")
    assert order.index("CHANGED") < order.index("CHANGED (accepted)") < order.index("PASS")


def test_diff_marks_the_changed_words_of_a_reason(tmp_path: Path) -> None:
    shown = page.of(gate_file.read(held(tmp_path)))
    (diff,), more = diffs.of_records(*shown.records, [])
    assert more == 0
    assert [line.kind for line in diff.lines] == ["-", "+"], "only reasons of the compiler are compared"
    marked = [[text for text, differs in line.parts if differs] for line in diff.lines]
    assert marked == [["66", "Mamba3Block"], ["71", "M2RNNBlock"]]
    (whole,), _ = diffs.of_records(*shown.records, ["compile/nam52-regional/graph_breaks"])
    assert EVIL in "".join(text for line in whole.lines for text, _ in line.parts)
    assert diffs.of_records(shown.records[0], shown.records[0], []) == ([], 0)


def test_page_escapes_markup_in_a_record(tmp_path: Path) -> None:
    found = seen(page.of(gate_file.read(held(tmp_path))))
    assert found.tags.count("script") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<script>alert('x')</script>") >= 5, "shown as text"


def test_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    path = held(tmp_path)
    (written,) = report.render(path, {"html": tmp_path / "out.html"})
    text = written.read_text()
    found = ParsedPage(text)
    addresses = [
        v for name, v in found.attributes if name in ("src", "href", "srcset", "action", "xlink:href")
    ]
    outside = [a for a in addresses if not a.startswith(("#", "data:,"))]
    assert outside == [page.of(gate_file.read(path)).compare] * 2, "links only, no files to load"
    assert not re.search(r"@import|url\(\s*['\"]?http", text)
    script = text[text.index("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(v for name, v in found.attributes if v.startswith("default-src"))
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_curves_of_both_sides_are_plotted_as_scalable_svg(tmp_path: Path) -> None:
    text = html_page(page.of(gate_file.read(held(tmp_path))))
    (drawn,) = re.findall(r"(?s)<svg.*?</svg>", text)
    root = ElementTree.fromstring(drawn)
    assert "width" not in root.attrib, "its width follows the page"
    assert len(re.findall(r"[ML] [\d.]+ [\d.]+", drawn)) >= 300, "drawn, all but what lies on a straight line"
    for words in (">nats<", ">step<", ">adopted: loss<", ">candidate: loss<"):
        assert words in drawn, words
    assert "<figcaption>model/nam12-corpus/loss_after_200_steps<" in text
    assert html_page(page.of(gate_file.read(held(tmp_path)))) == text, "the same record gives the same file"


def test_page_groups_red_rows_by_cause() -> None:
    reason = "reviewed {}, limit 1092.3, measured 1102 count"
    rows = [
        judged(Verdict.REGRESSION, row(f"compile/case{i}/guards"), reason.format(990 + i)) for i in range(3)
    ]
    hashes = [
        judged(Verdict.CHANGED, row(f"t/c{i}/code_hash", "ab"), f"reviewed 'c{i}f', measured 'ab'")
        for i in (1, 2)
    ]
    shown = page.of_record(record(*rows, *hashes, judged(P, row("a/b/c"))))
    assert [(f.label, len(f.rows)) for f in shown.findings] == [("REGRESSION", 3), ("CHANGED", 2)]
    assert shown.rows[-1].id == "a/b/c", "worst first"


def test_broken_run_still_has_a_report(tmp_path: Path) -> None:
    """Killed at start: no rows, no times, no end."""
    path = tmp_path / "record.json"
    write_record(path, {"lane": "cpu", "torch": None}, (), complete=False)
    written, xml, summary = report.render(path, report.default_paths(path, tmp_path))
    assert "NOT COMPLETE" in ParsedPage(written.read_text()).text
    assert ElementTree.parse(xml).getroot()[0].attrib["errors"] == "1"
    assert "NOT COMPLETE" in summary.read_text()


def test_page_lists_rows_not_run_on_this_device() -> None:
    lines = [f"throughput/nam52-regional/{name}: needs a TPU" for name in ("seconds", "bytes")]
    made = Record(HERE | {"lane": "v6e", "not_run": lines}, (judged(P, row()),))
    shown = page.of_record(made)
    assert shown.not_run == tuple(lines)
    assert all(line in seen(shown).text for line in lines)
    assert all(line in markdown.summary(shown) for line in lines)


def test_page_of_an_empty_run_is_not_green() -> None:
    assert page.of_record(record()).word == "NO ROWS"


def test_gate_with_broken_sides_still_has_a_report(tmp_path: Path) -> None:
    good = Side("torch 2.13.0", record(judged(P, row())))
    bad = Side(
        "torch 2.14.0", None, failure="importing torch: segmentation fault", command="uv pip sync x.toml"
    )
    path, verdict = write_gate(tmp_path, good, bad)
    assert verdict.decision is Decision.UNKNOWN
    text = seen(page.of(gate_file.read(path))).text
    assert "torch 2.14.0: importing torch: segmentation fault" in text
    (tmp_path / "adopted.json").write_text("{")
    shown = page.of(gate_file.read(path))
    assert any("adopted.json: not a record" in problem.why for problem in shown.problems)
    raw = json.loads(path.read_text())
    raw["timed"] = {"a/b/c": {"outcome": "INCONCLUSIVE", "ratio": None, "interval": [None, None]}}
    raw["finished"] = False
    path.write_text(json.dumps(raw))
    shown = page.of(gate_file.read(path))
    assert [r.label for r in shown.rows if r.id == "a/b/c"] == ["INCONCLUSIVE"]
    assert "the gate was cut short" in seen(shown).text


@pytest.mark.parametrize(
    "chosen", [(), ("html",), ("junit",), ("markdown", "junit")], ids=lambda chosen: " ".join(chosen) or "all"
)
def test_report_writes_exactly_the_formats_that_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: tuple[str, ...],
) -> None:
    path = held(tmp_path)
    before = {*tmp_path.iterdir()}
    named = {name: tmp_path / f"x.{name}" for name in chosen}
    options = [word for name, target in named.items() for word in (f"--{name}", str(target))]
    assert bumpgate(monkeypatch, "report", str(path), *options) == 0
    expected = {*named.values()} or {tmp_path / f"gate.{end}" for end in ("html", "junit.xml", "md")}
    assert {*tmp_path.iterdir()} - before == expected
    assert capsys.readouterr().out.count("wrote ") == len(expected)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("garbage", "neither a record nor a gate"),
        ("[]", "not a record of schema 2"),
        ('{"decision": "ADOPT"}', "a gate of schema None, this bumpgate reads 4: run the gate again"),
        ('{"decision": "MAYBE", "schema": 4, "lane": "cpu"}', "corrupt or incomplete gate file (KeyError"),
        (
            '{"decision": "ADOPT", "schema": 4, "lane": "cpu"}',
            "corrupt or incomplete gate file (KeyError: 'sides')",
        ),
    ],
)
def test_report_bad_input_prints_one_line_and_exits_4(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: str,
) -> None:
    path = tmp_path / "gate.json"
    if content is not None:
        path.write_text(content)
    assert bumpgate(monkeypatch, "report", str(path)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert sorted(p.name for p in tmp_path.iterdir()) == (["gate.json"] if content else [])


@pytest.mark.parametrize("option", ["--html", "--junit", "--markdown"])
@pytest.mark.parametrize(
    ("place", "words"), [("/", "/: a folder: name a file"), ("none/x", "No such file or directory")]
)
def test_report_that_cannot_be_written_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    place: str,
    words: str,
) -> None:
    target = place if place == "/" else str(tmp_path / place)
    assert bumpgate(monkeypatch, "report", str(held(tmp_path)), option, target) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_report_without_matplotlib_prints_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = held(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bumpgate(monkeypatch, "report", str(path)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == "bumpgate: a report with curves needs matplotlib; install it with: pip install 'bumpgate[report]'"
    )
    assert not (tmp_path / "gate.html").exists()
    assert bumpgate(monkeypatch, "report", str(path), "--junit", str(tmp_path / "j.xml")) == 0, "plain Python"


def test_gate_file_reads_records_of_its_own_folder_only(tmp_path: Path) -> None:
    """An untrusted gate.json must not make the report read other files."""
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "gate"
    folder.mkdir()
    path = held(folder)
    raw = json.loads(path.read_text())
    raw["sides"]["adopted"]["record"] = "../secret.json"
    path.write_text(json.dumps(raw))
    found = gate_file.read(path)
    assert isinstance(found, gate_file.GateFile)
    assert "secret.json: cannot be read" in found.adopted.failure


def test_gate_file_round_trips_findings(tmp_path: Path) -> None:
    path = held(tmp_path)
    found = gate_file.read(path)
    assert isinstance(found, gate_file.GateFile)
    first = found.findings[0]
    assert isinstance(first, Finding)
    assert first.rows == ("compile/nam52-regional/graph_breaks",)
    assert TEST in first.repro
    assert math.isclose(found.timed["throughput/nam52-regional/seconds"].ratio, 1.061)
    with pytest.raises(RecordError, match="not a record of schema 2"):
        gate_file.read(_write(tmp_path / "x.json", "{}"))


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_gate_file_reads_every_stage_of_a_gate(tmp_path: Path) -> None:
    """From the first write, without measurements, to the last."""
    gate = Gate(GateConfig("cpu", "torch==2.14.0"), "2026-11-21T02:00:00+00:00", "bumpgate gate --lane cpu")
    gate.write(tmp_path)
    shown = page.of(gate_file.read(tmp_path / "gate.json"))
    assert (shown.word, shown.failed) == ("UNKNOWN", True)
    assert shown.problems[0].why.startswith("the gate was cut short")
    made = record(judged(P, row()))
    for name in ("adopted", "candidate"):
        write_record(tmp_path / f"{name}.json", made.provenance, made.judgements)
        side = SideState(f"torch {name}", canaries={}, record=f"{name}.json", packages={"torch": "2.14.0"})
        gate = gate.with_side(name, side)
    gate = replace(gate, decision=Decision.ADOPT, finished=True, accepted=("a/b/c 17: accepted by ada",))
    gate.write(tmp_path)
    shown = page.of(gate_file.read(tmp_path / "gate.json"))
    assert (shown.word, shown.failed, shown.problems) == ("ADOPT", False, ())
    assert shown.notes == gate.accepted
    assert [r.label for r in shown.rows] == ["PASS"]
