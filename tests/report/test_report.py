"""The report of a record or a gate in HTML, JUnit XML and Markdown: what a CI shows, and what it treats as failure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import gate_file
from bumpgate.core.findings import Decision, Finding, TimedOutcome
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Record, Verdict, write_record
from bumpgate.gate.state import Gate, GateConfig, SideState
from bumpgate.gate.verdict import Side
from bumpgate.report import command as report
from bumpgate.report import diffs, junit, markdown, page
from bumpgate.report.html_page import html_page
from tests.support.reports import (
    EVIL,
    HERE,
    ParsedPage,
    bumpgate,
    held,
    judged,
    paired,
    record,
    row,
    write_gate,
)

FIXED = settings(derandomize=True, max_examples=30, deadline=None)
P = Verdict.PASS
RIGHT = (judged(P, row()), judged(P, row("a/b/c")))


def seen(shown: page.Page) -> ParsedPage:
    return ParsedPage(html_page(shown))


def read(path: Path) -> page.Page:
    return page.of(gate_file.read(path))


def suite_of(shown: page.Page) -> ElementTree.Element:
    return ElementTree.fromstring(junit.xml(shown))[0]


def faults(suite: ElementTree.Element) -> int:
    return int(suite.attrib["failures"]) + int(suite.attrib["errors"])


def gate_page(folder: Path, *candidate: Judgement, **side: Any) -> page.Page:
    """Return the page of a gate whose adopted side has two right rows. side: of the candidate."""
    bad = {"record": record(*candidate)} if candidate else {"record": None}
    path, _ = write_gate(folder, Side("torch 2.13.0", record(*RIGHT)), Side("torch 2.14.0", **bad | side))
    return read(path)


def test_gate_page_shows_both_sides(tmp_path: Path) -> None:
    shown = read(held(tmp_path))
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
    shown = read(held(tmp_path))
    (diff,), more = diffs.of_records(*shown.records, [])
    assert more == 0
    assert [line.kind for line in diff.lines] == ["-", "+"], "only reasons of the compiler are compared"
    marked = [[text for text, differs in line.parts if differs] for line in diff.lines]
    assert marked == [["66", "Mamba3Block"], ["71", "M2RNNBlock"]]
    (whole,), _ = diffs.of_records(*shown.records, ["compile/nam52-regional/graph_breaks"])
    assert EVIL in "".join(text for line in whole.lines for text, _ in line.parts)
    assert diffs.of_records(shown.records[0], shown.records[0], []) == ([], 0)


def test_page_escapes_markup_and_loads_nothing(tmp_path: Path) -> None:
    """It runs only its own script, and its links lead to the comparison of the two builds."""
    path = held(tmp_path)
    (written,) = report.render(path, {"html": tmp_path / "out.html"})
    text = written.read_text()
    found = ParsedPage(text)
    assert found.tags.count("script") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<script>alert('x')</script>") >= 5, "shown as text"
    names = ("src", "href", "srcset", "action", "xlink:href")
    addresses = [value for name, value in found.attributes if name in names]
    outside = [a for a in addresses if not a.startswith(("#", "data:,"))]
    assert outside == [read(path).compare] * 2, "links only, no files to load"
    assert not re.search(r"@import|url\(\s*['\"]?http", text)
    script = text[text.index("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(v for name, v in found.attributes if v.startswith("default-src"))
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_curves_of_both_sides_are_plotted_as_scalable_svg(tmp_path: Path) -> None:
    text = html_page(read(held(tmp_path)))
    (drawn,) = re.findall(r"(?s)<svg.*?</svg>", text)
    assert "width" not in ElementTree.fromstring(drawn).attrib, "its width follows the page"
    assert len(re.findall(r"[ML] [\d.]+ [\d.]+", drawn)) >= 300, "drawn, all but what lies on a straight line"
    for words in (">nats<", ">step<", ">adopted: loss<", ">candidate: loss<"):
        assert words in drawn, words
    assert "<figcaption>model/nam12-corpus/loss_after_200_steps<" in text
    assert html_page(read(held(tmp_path))) == text, "the same record gives the same file"


def test_page_groups_red_rows_by_cause() -> None:
    guards = [f"reviewed {990 + i}, limit 1092.3, measured 1102 count" for i in range(3)]
    rows = [judged(Verdict.REGRESSION, row(f"compile/c{i}/guards"), why) for i, why in enumerate(guards)]
    for i in (1, 2):
        made = row(f"t/c{i}/code_hash", "ab")
        rows.append(judged(Verdict.CHANGED, made, f"reviewed 'c{i}f', measured 'ab'"))
    shown = page.of_record(record(*rows, judged(P, row("a/b/c"))))
    assert [(f.label, len(f.rows)) for f in shown.findings] == [("REGRESSION", 3), ("CHANGED", 2)]
    assert shown.rows[-1].id == "a/b/c", "worst first"


def test_first_run_is_one_card_with_its_command() -> None:
    rows = [judged(Verdict.NEW, row(f"model/case{i}/bytes", i)) for i in range(9)]
    shown = page.of_record(record(*rows))
    assert (shown.word, shown.tone, shown.failed) == ("NOT REVIEWED", "open", True)
    (finding,) = shown.findings
    assert (finding.label, len(finding.rows), finding.repro) == ("NEW", 9, "bumpgate rebaseline --lane cpu")
    assert finding.candidate[3] == "model/case3/bytes: 3 count"


def test_unknown_gate_says_what_was_equal_and_what_to_do(tmp_path: Path) -> None:
    open_time = paired(TimedOutcome.INCONCLUSIVE, 1.0)
    rows = (*RIGHT, judged(Verdict.NEW, row("a/new/c")))
    sides = Side("torch 2.13.0", record(*rows)), Side("torch 2.14.0", record(*rows))
    path, _ = write_gate(tmp_path, *sides, {"throughput/x/seconds": open_time})
    shown = read(path)
    assert shown.meaning[0].startswith("UNKNOWN: evidence is missing")
    assert "nothing was found against the candidate: 3 of 3 decided rows are equal" in shown.meaning[1]
    assert shown.meaning[2] == "bumpgate gate --lane cpu --candidate torch==2.14.0 --resume"
    assert all(line in html_page(shown).replace("&#39;", "'") for line in shown.meaning)
    moved = ("nvidia-cublas 13.0 -> 13.1", "nvidia-nccl 2.29 -> 2.30", "torch 2.13.0 -> 2.14.0")
    libraries = "2 CUDA libraries: nvidia-cublas 13.0 -> 13.1; nvidia-nccl 2.29 -> 2.30"
    assert page.of_gate(replace(gate_file.read(path), moved=moved)).moved == (moved[2], libraries)


def test_broken_run_still_has_a_report(tmp_path: Path) -> None:
    """Killed at start: no rows, no times, no end."""
    path = tmp_path / "record.json"
    write_record(path, {"lane": "cpu", "torch": None}, (), complete=False)
    written, xml, summary = report.render(path, report.default_paths(path, tmp_path))
    assert "NOT COMPLETE" in ParsedPage(written.read_text()).text
    assert ElementTree.parse(xml).getroot()[0].attrib["errors"] == "1"
    assert "NOT COMPLETE" in summary.read_text()
    assert page.of_record(record()).word == "NO ROWS", "an empty run is not green"


def test_page_lists_rows_not_run_on_this_device() -> None:
    lines = [f"throughput/nam52-regional/{name}: needs a TPU" for name in ("seconds", "bytes")]
    shown = page.of_record(Record(HERE | {"lane": "v6e", "not_run": lines}, (judged(P, row()),)))
    assert shown.not_run == tuple(lines)
    for text in (seen(shown).text, markdown.summary(shown)):
        assert all(line in text for line in lines)


def test_gate_with_broken_sides_still_has_a_report(tmp_path: Path) -> None:
    failure = "importing torch: segmentation fault"
    shown = gate_page(tmp_path, failure=failure, command="uv pip sync x.toml")
    assert shown.word == "UNKNOWN"
    assert f"torch 2.14.0: {failure}" in seen(shown).text
    (tmp_path / "adopted.json").write_text("{")
    path = tmp_path / "gate.json"
    assert any("adopted.json: not a record" in problem.why for problem in read(path).problems)
    raw = json.loads(path.read_text())
    raw["timed"] = {"a/b/c": {"outcome": "INCONCLUSIVE", "ratio": None, "interval": [None, None]}}
    path.write_text(json.dumps(raw | {"finished": False}))
    shown = read(path)
    assert [r.label for r in shown.rows if r.id == "a/b/c"] == ["INCONCLUSIVE"]
    assert "the gate was cut short" in seen(shown).text
    (tmp_path / "below").mkdir()
    raw["sides"]["adopted"]["record"] = "../candidate.json"
    (tmp_path / "below/gate.json").write_text(json.dumps(raw))
    found = gate_file.read(tmp_path / "below/gate.json")
    assert isinstance(found, gate_file.GateFile)
    assert "candidate.json: cannot be read" in found.adopted.failure, "no file of another folder is read"


@pytest.mark.parametrize("chosen", [(), ("html",), ("junit",), ("markdown", "junit")], ids=str)
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


SCHEMA_4 = '"schema": 4, "lane": "cpu"}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("garbage", "neither a record nor a gate"),
        ("[]", "not a record of schema 2"),
        ('{"decision": "ADOPT"}', "a gate of schema None, this bumpgate reads 4: run the gate again"),
        (f'{{"decision": "MAYBE", {SCHEMA_4}', "corrupt or incomplete gate file (KeyError"),
        (f'{{"decision": "ADOPT", {SCHEMA_4}', "corrupt or incomplete gate file (KeyError: 'sides')"),
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


def test_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = held(tmp_path)

    def fails(*options: str) -> str:
        assert bumpgate(monkeypatch, "report", str(path), *options) == 4
        (line,) = capsys.readouterr().err.splitlines()
        return line

    for option in ("--html", "--junit", "--markdown"):
        assert "/: a folder: name a file" in fails(option, "/")
        assert "No such file or directory" in fails(option, str(tmp_path / "none/x"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needs = "a report with curves needs matplotlib; install it with: pip install 'bumpgate[report]'"
    assert fails() == f"bumpgate: {needs}"
    assert not (tmp_path / "gate.html").exists()
    assert bumpgate(monkeypatch, "report", str(path), "--junit", str(tmp_path / "j.xml")) == 0, "plain Python"


def test_gate_file_reads_every_stage_of_a_gate(tmp_path: Path) -> None:
    """From the first write, without measurements, to the last."""
    gate = Gate(GateConfig("cpu", "torch==2.14.0"), "2026-11-21T02:00:00+00:00", "bumpgate gate --lane cpu")
    gate.write(tmp_path)
    shown = read(tmp_path / "gate.json")
    assert (shown.word, shown.failed) == ("UNKNOWN", True)
    assert shown.problems[0].why.startswith("the gate was cut short")
    made = record(judged(P, row()))
    for name in ("adopted", "candidate"):
        write_record(tmp_path / f"{name}.json", made.provenance, made.judgements)
        side = SideState(f"torch {name}", canaries={}, record=f"{name}.json", packages={"torch": "2.14.0"})
        gate = gate.with_side(name, side)
    gate = replace(gate, decision=Decision.ADOPT, finished=True, accepted=("a/b/c 17: accepted by ada",))
    gate.write(tmp_path)
    shown = read(tmp_path / "gate.json")
    assert (shown.word, shown.failed, shown.problems) == ("ADOPT", False, ())
    assert (shown.notes, [r.label for r in shown.rows]) == (gate.accepted, ["PASS"])


@pytest.mark.parametrize("verdict", list(Verdict))
def test_junit_fails_if_and_only_if_the_gate_fails(tmp_path: Path, verdict: Verdict) -> None:
    shown = gate_page(tmp_path, judged(verdict, row(value=17) if verdict.red else row(), "why"), RIGHT[1])
    suite = suite_of(shown)
    assert (faults(suite) > 0) is shown.failed is verdict.red
    assert (int(suite.attrib["failures"]) > 0) is (shown.word == "HOLD")
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))


def test_junit_names_a_failed_environment(tmp_path: Path) -> None:
    suite = suite_of(gate_page(tmp_path, *RIGHT, canaries={"graphs": "read 2, knows 1"}))
    (error,) = suite.findall("testcase/error")
    assert "read 2, knows 1" in (error.text or "")
    names = {case.attrib["classname"] for case in suite.findall("testcase")}
    assert names == {"compile.nam52-regional", "a.b", "gate"}


@pytest.mark.parametrize("lost", ["good", "bad", "finished"])
def test_rows_that_a_gate_did_not_compare_are_not_passed(tmp_path: Path, lost: str) -> None:
    changed = record(judged(Verdict.CHANGED, row(value=17)), RIGHT[1])
    found = {"good": record(*RIGHT), "bad": changed}
    found.pop(lost, None)
    path, _ = write_gate(tmp_path, *(Side(f"torch {side}", found.get(side)) for side in ("good", "bad")))
    if lost == "finished":
        unfinished = {"finished": False, "decision": "UNKNOWN", "findings": []}
        path.write_text(json.dumps(json.loads(path.read_text()) | unfinished))
    shown = read(path)
    assert {(r.label, r.tone) for r in shown.rows} == {("NOT COMPARED", "open")}
    assert all(r.reason.startswith("not compared: ") for r in shown.rows)
    assert "0 of 2 rows are right" in markdown.summary(shown)
    assert [case for case in suite_of(shown).findall("testcase") if not list(case)] == []


texts = st.text(max_size=30) | st.sampled_from([EVIL, "\x00\x1b[31m\ud800", "a\nb\tc", "]]>"])
judgements = st.builds(
    lambda n, verdict, reason, evidence, accepted: Judgement(
        row(f"a/case{n}/n", evidence=tuple(evidence)), verdict, reason, "pytest", accepted=accepted
    ),
    st.integers(0, 5),
    st.sampled_from(list(Verdict)),
    texts,
    st.lists(texts, max_size=2),
    st.sampled_from(["", "ada, until 2026-12-31: known"]),
)


@FIXED
@given(
    st.lists(judgements, unique_by=lambda j: j.row.id, max_size=4),
    st.lists(st.builds(Problem, texts, st.sampled_from(ProblemKind), texts), max_size=2),
    st.booleans(),
)
def test_any_record_renders_and_junit_matches_its_verdict(
    found: list[Judgement], problems: list[Problem], complete: bool
) -> None:
    made = record(*found, problems=tuple(problems), complete=complete)
    shown = page.of_record(made)
    assert (faults(suite_of(shown)) > 0) is made.red
    assert seen(shown).tags.count("script") == 1
    assert markdown.summary(shown).count("<details") == len(shown.findings)


def test_summary_fits_the_limit_and_counts_omitted_rows(tmp_path: Path) -> None:
    reasons = [f"reviewed 1, measured {i} \u2192 " + "x" * 1500 for i in range(900)]
    red = [judged(Verdict.CHANGED, row(f"a/case{i}/n"), reason) for i, reason in enumerate(reasons)]
    text = markdown.summary(page.of_record(record(*red, RIGHT[1])))
    assert 900_000 < len(text.encode()) <= 1024 * 1024
    left = int(re.search(r"(\d+) more lines, causes and rows do not fit", text)[1])
    assert text.count("| \U0001f534 CHANGED |") + left == 900
    assert text.endswith("1 of 901 rows are right.\n")
    assert "do not fit" not in markdown.summary(page.of_record(record(*red[:5])))
    huge = markdown.summary(gate_page(tmp_path, failure="x" * 2 * markdown.LIMIT))
    assert huge.startswith("## \U0001f7e0 UNKNOWN: torch 2.13.0")
    assert "NOT COMPARED" in huge
    assert "\n1 more lines, causes and rows do not fit here" in huge


def test_summary_escapes_hostile_markup() -> None:
    hostile = f"{EVIL} @everyone [a](http://x) # *b* ~~c~~ ![i](http://y) ```"
    shown = page.of_record(record(judged(Verdict.CHANGED, row(evidence=(hostile,)), hostile)))
    text = markdown.summary(shown)
    outside = re.sub(r"(?ms)^(`{3,})$.*?^\1$", "", text)
    assert "````" in text, "a fence longer than the one inside"
    for markup in ("<script", "@everyone", "[a]", "![i", "*b*", "~~"):
        assert markup not in outside, markup


@pytest.mark.parametrize(
    ("rows", "words"), [((), "the environment"), (("a",), "1 row"), (("a", "b"), "2 rows")]
)
def test_summary_counts_the_rows_of_a_finding(rows: tuple[str, ...], words: str) -> None:
    finding = Finding(Decision.HOLD, "CHANGED", "graph_breaks", "a break", rows, (), (), "")
    assert f"<b>CHANGED graph_breaks</b> ({words})" in markdown.finding_block(finding)


@pytest.mark.parametrize("option", ["--html", "--junit", "--markdown"])
def test_report_replaces_earlier_reports_alone(option: str, tmp_path: Path, monkeypatch) -> None:
    gate = held(tmp_path)
    reviewed, report = tmp_path / "cpu.json", tmp_path / "report"
    reviewed.write_text("{}\n")
    assert bumpgate(monkeypatch, "report", str(gate), option, str(reviewed)) == 4
    assert reviewed.read_text() == "{}\n"
    for _ in range(2):
        assert bumpgate(monkeypatch, "report", str(gate), option, str(report)) == 0
