"""The mutant matrix reads the results of runs, and reports what is missing."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from bumpgate.core.rows import Judgement, Row, Verdict, write_record
from tests.support.mutants import MUTANTS
from tests.support.tree import ROOT
from tools import matrix

TESTS = sorted((ROOT / "suites").rglob("test_*.py"))


def marks(path: Path) -> list[tuple[str, str]]:
    """Return rule and fault of each @planted of a file, parsed without importing it."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        tuple(map(ast.literal_eval, call.args))
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "planted" and len(call.args) == 2
        if all(isinstance(a, ast.Constant) for a in call.args) and str(call.args[0].value)[:1] in "CIRX"
    ]


def test_planted_marks_name_known_rules() -> None:
    """Checked in the sources. Whether every rule has a killer is checked by CI, which makes the matrix of its runs."""
    have = {rule for path in TESTS for rule, _ in marks(path)} | {m.words[0] for m in MUTANTS}
    known = set(matrix.rules())
    assert len(known) >= 45
    assert len(have) > 30
    assert not have - known, f"rules.toml lacks {sorted(have - known)}"


@pytest.fixture
def run(tmp_path: Path, three_rules: None):
    """Return a writer of a JUnit file of (property value or None, child tag or "") and a record of rows with rules."""

    def write(cases, rules):
        body = ""
        for i, (mark, child) in enumerate(cases):
            value = quoteattr(json.dumps(mark)) if mark else ""
            marked = f'<properties><property name="planted" value={value}/></properties>' if mark else ""
            body += f'<testcase classname="suites.a.test_b" name="test_{i}">{marked}{child}</testcase>'
        junit, record = tmp_path / "run.xml", tmp_path / "record.json"
        junit.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
        rows = [Row(f"a/{rule}/count", 1, "count", witness, rule, expected=1) for rule, witness in rules]
        write_record(record, {"lane": "cpu"}, [Judgement(row, Verdict.PASS, "") for row in rows])
        return [str(junit), "--record", str(record), "--out", str(tmp_path / "mutants.md")]

    return write


def mark_of(rule: str, **more) -> dict:
    return {"rule": rule, "fault": f"a fault of {rule}", "row": "", "red": [], **more}


@pytest.fixture
def three_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[C1]\nsays = "one"\n[C2]\nsays = "two"\n[X1]\nsays = "three"\nlane = "v6e"\n')
    real = matrix.rules
    monkeypatch.setattr(matrix, "rules", lambda path=file: real(path))


def test_complete_run_exits_0_without_gaps(run, tmp_path: Path, capsys) -> None:
    arguments = run(
        [(mark_of("C1"), ""), (mark_of("C2", row="a/b/c", red=["d/e/f"]), "")], [("C1", 1), ("C2", 3)]
    )
    assert matrix.main(arguments) == 0
    report = (tmp_path / "mutants.md").read_text()
    assert "2 planted faults of 2 rules, 2 killed" in report
    assert "| C2: two | 1 | a fault of C2 | `a/b/c` | d/e/f |" in report
    assert "lane v6e did not run" in report
    assert "2 killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cases", "rules", "line"),
    [
        ([("C1", "<failure/>"), ("C2", "")], ["C1", "C2"], "C1: a fault of C1: survived"),
        ([("C1", "<skipped/>"), ("C2", "")], ["C1", "C2"], "C1: a fault of C1: survived"),
        ([("C1", "")], ["C1", "C2"], "C2: no planted fault: two"),
        ([("C1", ""), ("C2", "")], ["C1"], "C2: no row checks it: two"),
        ([("C1", ""), ("C2", ""), ("C9", "")], ["C1", "C2"], "C9: a fault of C9: no such rule"),
    ],
)
def test_gap_is_printed_and_exits_1(run, cases, rules, line: str, capsys) -> None:
    arguments = run([(mark_of(rule), child) for rule, child in cases], [(rule, 1) for rule in rules])
    assert matrix.main(arguments) == 1
    assert line in capsys.readouterr().out


def test_row_with_zero_witness_does_not_cover_its_rule(run, capsys) -> None:
    arguments = run([(mark_of("C1"), ""), (mark_of("C2"), "")], [("C1", 1), ("C2", 0)])
    assert matrix.main(arguments) == 1
    assert "C2: no row checks it" in capsys.readouterr().out


def test_rules_of_a_lane_that_ran_are_required(run, capsys) -> None:
    arguments = run([(mark_of("C1"), ""), (mark_of("C2"), "")], [("C1", 1), ("C2", 1)])
    assert matrix.main([*arguments, "--lane", "cpu", "--lane", "v6e"]) == 1
    assert "X1: no planted fault" in capsys.readouterr().out


def test_rules_of_a_lane_that_did_not_run_are_not_required(run, tmp_path: Path) -> None:
    arguments = run([(mark_of("X1"), ""), (mark_of("C2"), "")], [("X1", 1)])
    assert matrix.main([*arguments, "--lane", "v6e"]) == 0
    report = (tmp_path / "mutants.md").read_text()
    assert "| C1: one | lane cpu did not run |" in report
    assert "| C2: two | 0 | a fault of C2 |" in report


@pytest.mark.parametrize("bad", ["absent.xml", "broken.xml"])
def test_unreadable_junit_file_is_reported_in_one_line(tmp_path: Path, bad: str, capsys) -> None:
    (tmp_path / "broken.xml").write_text("no XML")
    assert matrix.main([str(tmp_path / bad), "--out", str(tmp_path / "made" / "mutants.md")]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert not (tmp_path / "made").exists()
