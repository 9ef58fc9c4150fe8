"""Display of a red row: both numbers, the sentence of its rule, and its source location."""

from __future__ import annotations

import shutil

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, limit, save
from bumpgate.core.rows import Row
from bumpgate.report import markdown, page
from bumpgate.report.html_page import html_page
from tests.support.project import REPO, Project, counted

BODY = """
@lanes("cpu")
def test_rows(lane, row):
    row.count("compile/changed/graph_breaks", 5, evidence=["GB0007 at model/hybrid.py:88"], **COUNT)
    row.timed("compile/slower/seconds", at(3.0, 2.9, 3.1), **TIMED)

@lanes("cpu")
def test_assert(lane, row):
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)
    assert len("ab") == 3

@lanes("cpu")
def test_later(lane, row):
    row.count("compile/one/graph_breaks", 1, **COUNT)
    row.count("compile/two/graph_breaks", 1, **COUNT)
"""
RULE = "C6: graph breaks are where the policy puts them, counted, and nowhere else"


@pytest.fixture
def ran(project: Project) -> Project:
    project.tests(BODY)
    shutil.copy(REPO / "suites/rules.toml", project.root / "suites/rules.toml")
    rows = {f"compile/{name}/graph_breaks": counted("test_later", 1, "exact") for name in ("one", "two")}
    rows["compile/changed/graph_breaks"] = counted("test_rows", 4, "exact")
    rows["compile/good/graph_breaks"] = counted("test_assert")
    test = "suites/compile/test_a.py::test_rows[cpu]"
    rows["compile/slower/seconds"] = Reviewed(2.0, "s", "lower", 0.1, test=test)
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0", "triton": None}, rows))
    return project


def test_red_row_shows_numbers_rule_and_place(ran: Project) -> None:
    """On the terminal, in the record, and in the report; a plain assert names its place and rule as well."""
    out = ran.pytest("-m", "cpu", "-n", "1").out
    lines = (ran.root / "suites/compile/test_a.py").read_text().splitlines()
    at = {words: f"suites/compile/test_a.py:{n}" for n, line in enumerate(lines, 1)
          for words in ("compile/changed", "assert len") if words in line}  # fmt: skip
    assert (
        "CHANGED       compile/changed/graph_breaks: reviewed 4, measured 5 breaks\n"
        "              value 5 | reviewed 4 | limit = 4\n"
        f"              {RULE}\n"
        f"              at {at['compile/changed']}, model/hybrid.py:88\n"
        "              -> bumpgate rebaseline --lane cpu --only compile/changed/graph_breaks\n"
    ) in out
    assert "              value 3 | reviewed 2 | limit <= 2.2\n" in out
    record = ran.record()
    assert record.provenance["rules"]["C6"] == RULE.removeprefix("C6: ")
    (problem,) = record.problems
    assert str(problem).startswith("suites/compile/test_a.py::test_assert[cpu]: ")
    assert str(problem).endswith(f"(at {at['assert len']}) [{RULE}]")
    shown = page.of(record)
    row = next(r for r in shown.rows if r.id == "compile/changed/graph_breaks")
    assert (row.candidate, row.reviewed, row.limit, row.rule) == ("5", "4", "= 4", RULE)
    assert row.place.endswith(", model/hybrid.py:88")
    text = markdown.summary(shown)
    assert "| verdict | row | adopted | candidate | reviewed | limit | why | rule | place |" in text
    assert "| 5 | 4 | = 4 |" in text
    assert markdown.escape(RULE) in text
    html = html_page(shown)
    assert ("Reviewed" in html, RULE in html) == (True, True)


def test_rows_after_an_early_stop_are_one_line(ran: Project) -> None:
    done = ran.pytest("-m", "cpu", "-n", "0", "-x")
    assert "MISSING       3 rows not measured because the run stopped early\n" in done.out
    assert "compile/one/graph_breaks" not in done.out
    assert ran.verdicts()["one"] == "MISSING", "the record contains every row"


ROW = {"unit": "n", "witness": 1, "rule": "C1"}


@pytest.mark.parametrize(
    ("row", "old", "text"),
    [
        (Row("a/b/n", 1, **ROW), None, ""),
        (Row("a/b/n", 1, **ROW), Reviewed(2, "n", "exact"), "= 2"),
        (Row("a/b/n", 1, better="derived", expected=3, **ROW), None, "= 3"),
        (Row("a/b/n", 1, better="derived", at_most=4, at_least=1, **ROW), None, "<= 4, >= 1"),
        (Row("a/b/n", 1, better="lower", tolerance=9, **ROW), Reviewed(10, "n", "lower", 0.1), "<= 11"),
        (Row("a/b/n", 1, better="higher", **ROW), Reviewed(-10, "n", "higher", 0.1), ">= -11"),
    ],
)
def test_displayed_limit_matches_the_judgement(row: Row, old: Reviewed | None, text: str) -> None:
    assert limit(row, old) == text
