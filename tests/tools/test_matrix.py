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


def marks(path: Path) -> list[str]:
    """Return the rule of each @planted of a file, parsed without importing it."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    planted = [
        call.args for call in calls if getattr(call.func, "id", "") == "planted" and len(call.args) == 2
    ]
    constant = [a[0].value for a in planted if all(isinstance(each, ast.Constant) for each in a)]
    return [str(rule) for rule in constant if str(rule)[:1] in "CIRX"]


def test_planted_marks_name_known_rules() -> None:
    """Checked in the sources. Whether every rule has a killer is checked by CI, which makes the matrix of its runs."""
    have = {rule for path in (ROOT / "suites").rglob("test_*.py") for rule in marks(path)}
    have |= {mutant.words[0] for mutant in MUTANTS}
    known = set(matrix.rules())
    assert (len(known) >= 45, len(have) > 30) == (True, True)
    assert not have - known, f"rules.toml lacks {sorted(have - known)}"


# Each case: planted faults as (rule, child of the test case), and rules of rows with their witness.
C1, C2, X1 = ("C1", ""), ("C2", ""), ("X1", "")
BOTH = {"C1": 1, "C2": 3}


@pytest.mark.parametrize(
    ("cases", "rules", "lanes", "code", "line"),
    [
        ([C1, C2], BOTH, (), 0, "| C2: two | 3 rows"),
        ([("C1", "<failure/>"), C2], BOTH, (), 1, "C1: a fault of C1: survived"),
        ([("C1", "<skipped/>"), C2], BOTH, (), 1, "C1: a fault of C1: survived"),
        ([C1], BOTH, (), 1, "C2: no planted fault: two"),
        ([C1, C2], {"C1": 1}, (), 1, "C2: no row checks it: two"),
        ([C1, C2], {"C1": 1, "C2": 0}, (), 1, "C2: no row checks it"),
        ([C1, C2, ("C9", "")], BOTH, (), 1, "C9: a fault of C9: no such rule"),
        ([C1, C2], BOTH, ("cpu", "v6e"), 1, "X1: no planted fault"),
        ([X1, C2], {"X1": 1}, ("v6e",), 0, "| C1: one | lane cpu did not run |"),
    ],
)
def test_gaps_are_printed_and_exit_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    cases: list[tuple[str, str]],
    rules: dict[str, int],
    lanes: tuple[str, ...],
    code: int,
    line: str,
) -> None:
    known = tmp_path / "rules.toml"
    known.write_text('[C1]\nsays = "one"\n[C2]\nsays = "two"\n[X1]\nsays = "three"\nlane = "v6e"\n')
    monkeypatch.setattr(matrix, "rules", lambda real=matrix.rules: real(known))
    body = ""
    for i, (rule, child) in enumerate(cases):
        mark = {"rule": rule, "fault": f"a fault of {rule}", "row": "", "red": ["d/e/f"]}
        marked = f'<properties><property name="planted" value={quoteattr(json.dumps(mark))}/></properties>'
        body += f'<testcase classname="suites.a.test_b" name="test_{i}">{marked}{child}</testcase>'
    junit, record, out = (tmp_path / name for name in ("run.xml", "record.json", "mutants.md"))
    junit.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    rows = [Row(f"a/{rule}/count", 1, "count", witness, rule, expected=1) for rule, witness in rules.items()]
    write_record(record, {"lane": "cpu"}, [Judgement(row, Verdict.PASS, "") for row in rows])
    of_lanes = [word for lane in lanes for word in ("--lane", lane)]
    assert matrix.main([str(junit), "--record", str(record), "--out", str(out), *of_lanes]) == code
    report, printed = out.read_text(), capsys.readouterr().out
    if line.endswith(" rows"):
        assert "2 planted faults of 2 rules, 2 killed" in report
        assert "| C2: two | 1 | a fault of C2 | `suites/a/test_b.py::test_1` | d/e/f |" in report
        assert "lane v6e did not run" in report
        assert "2 killed" in printed
    else:
        assert line in (printed if code else report)


@pytest.mark.parametrize("bad", ["absent.xml", "broken.xml"])
def test_unreadable_junit_file_is_reported_in_one_line(tmp_path: Path, bad: str, capsys) -> None:
    (tmp_path / "broken.xml").write_text("no XML")
    assert matrix.main([str(tmp_path / bad), "--out", str(tmp_path / "made" / "mutants.md")]) == 2
    assert (capsys.readouterr().err.count("\n"), (tmp_path / "made").exists()) == (1, False)
