"""The report as JUnit XML and as Markdown: what a CI displays, and what it treats as failure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import gate_file
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Verdict
from bumpgate.gate.verdict import Side
from bumpgate.report import junit, markdown, page
from bumpgate.report.html_page import html_page
from tests.support.reports import EVIL, ParsedPage, judged, record, row, write_gate

FIXED = settings(derandomize=True, max_examples=30, deadline=None)
P = Verdict.PASS


def gate_of(folder: Path, verdict: Verdict, **side: object) -> page.Page:
    """A gate whose candidate has one row with this verdict and one that passes."""
    good = Side("torch 2.13.0", record(judged(P, row()), judged(P, row("a/b/c"))))
    bad = Side(
        "torch 2.14.0",
        record(judged(verdict, row(value=17) if verdict.red else row(), "why"), judged(P, row("a/b/c"))),
        **side,
    )
    return page.of(gate_file.read(write_gate(folder, good, bad)[0]))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_junit_fails_if_and_only_if_the_gate_fails(tmp_path: Path, verdict: Verdict) -> None:
    shown = gate_of(tmp_path, verdict)
    suite = ElementTree.fromstring(junit.xml(shown))[0]
    failures, errors = int(suite.attrib["failures"]), int(suite.attrib["errors"])
    assert (failures + errors > 0) is shown.failed is verdict.red
    assert (failures > 0) is (shown.word == "HOLD")
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))


def test_junit_names_a_failed_environment(tmp_path: Path) -> None:
    shown = gate_of(tmp_path, P, canaries={"graphs": "read 2, knows 1"})
    suite = ElementTree.fromstring(junit.xml(shown))[0]
    (error,) = suite.findall("testcase/error")
    assert "read 2, knows 1" in (error.text or "")
    assert {c.attrib["classname"] for c in suite.findall("testcase")} == {
        "compile.nam52-regional",
        "a.b",
        "gate",
    }


@pytest.mark.parametrize("lost", ["good", "bad", "finished"])
def test_rows_that_a_gate_did_not_compare_are_not_passed(tmp_path: Path, lost: str) -> None:
    found = {side: record(judged(P, row()), judged(P, row("a/b/c"))) for side in ("good", "bad")}
    found["bad"] = record(judged(Verdict.CHANGED, row(value=17)), judged(P, row("a/b/c")))
    found.pop(lost, None)
    good, bad = (Side(f"torch {side}", found.get(side)) for side in ("good", "bad"))
    path, _ = write_gate(tmp_path, good, bad)
    if lost == "finished":
        unfinished = {"finished": False, "decision": "UNKNOWN", "findings": []}
        path.write_text(json.dumps(json.loads(path.read_text()) | unfinished))
    shown = page.of(gate_file.read(path))
    assert {(r.label, r.tone) for r in shown.rows} == {("NOT COMPARED", "open")}
    assert all(r.reason.startswith("not compared: ") for r in shown.rows)
    assert "0 of 2 rows are right" in markdown.summary(shown)
    suite = ElementTree.fromstring(junit.xml(shown))[0]
    assert len([case for case in suite.findall("testcase") if not list(case)]) == 0


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
    suite = ElementTree.fromstring(junit.xml(shown))[0]
    assert (int(suite.attrib["failures"]) + int(suite.attrib["errors"]) > 0) is made.red
    assert ParsedPage(html_page(shown)).tags.count("script") == 1
    assert markdown.summary(shown).count("<details") == len(shown.findings)


def test_summary_fits_the_limit_and_counts_omitted_rows() -> None:
    red = [
        judged(Verdict.CHANGED, row(f"a/case{i}/n"), f"reviewed 1, measured {i} \u2192 " + "x" * 1500)
        for i in range(900)
    ]
    shown = page.of_record(record(*red, judged(P, row("a/b/c"))))
    text = markdown.summary(shown)
    assert 900_000 < len(text.encode()) <= 1024 * 1024
    left = int(re.search(r"(\d+) more lines, causes and rows do not fit", text)[1])
    listed = text.count("| \U0001f534 CHANGED |")
    assert listed + left == 900
    assert text.endswith("1 of 901 rows are right.\n")
    assert "do not fit" not in markdown.summary(page.of_record(record(*red[:5])))


def test_summary_has_the_verdict_next_to_a_huge_line(tmp_path: Path) -> None:
    good = Side("torch 2.13.0", record(judged(P, row())))
    bad = Side("torch 2.14.0", None, failure="x" * 2 * markdown.LIMIT)
    text = markdown.summary(page.of(gate_file.read(write_gate(tmp_path, good, bad)[0])))
    assert text.startswith("## \U0001f7e0 UNKNOWN: torch 2.13.0")
    assert "NOT COMPARED" in text
    assert "\n1 more lines, causes and rows do not fit here" in text


def test_summary_escapes_hostile_markup(tmp_path: Path) -> None:
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
    assert f"<b>CHANGED graph_breaks</b> ({words})" in markdown._finding(finding)
