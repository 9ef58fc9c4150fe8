"""Tests without a lane's marker: a lane with `tests` takes them unchanged, and each outcome is a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bumpgate.core.findings import Decision
from bumpgate.core.lanes import LaneError, load
from bumpgate.core.outcomes import row_id
from bumpgate.core.rows import ROW_ID, read_record
from bumpgate.gate.verdict import GateVerdict, Side, judge_gate
from tests.support.foreign import Foreign

LANE = "[lanes.mine]\ntests = ['tests']\n"
TESTS = """
import os
import warnings
import pytest

SIDE = os.environ.get("SIDE", "good")

def test_add(): assert 1 + 1 == 2

@pytest.mark.parametrize("pattern", ["a b", "(a b)"])
def test_pattern(pattern): pass

@pytest.mark.skip(reason="no jax")
def test_jax(): raise AssertionError

@pytest.mark.xfail
def test_known(): assert 0

@pytest.mark.xfail
def test_fixed(): pass
"""
SKIPPED_MODULE = "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n"


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    made = Foreign(tmp_path)
    files = {"bumpgate.toml": LANE, "pytest.ini": "[pytest]\n", "tests/test_unchanged.py": TESTS}
    for path, text in files.items():
        made.write(path, text)
    return made


def values(foreign: Foreign) -> dict[str, object]:
    """Map node id -> the value of its row in the last record."""
    return {j.row.test: j.row.value for j in foreign.record().judgements}


def test_each_outcome_of_an_unmarked_test_is_a_row(foreign: Foreign) -> None:
    foreign.write("tests/test_optional.py", SKIPPED_MODULE)
    foreign.write("tests_of_others/test_other.py", "def test_other(): pass\n")
    ran = foreign.pytest("-m", "mine", "--gate")
    assert ran.code == 0, ran.out + ran.err
    head = "tests/test_unchanged.py::"
    assert values(foreign) == {
        f"{head}test_add": "passed",
        f"{head}test_pattern[a b]": "passed",
        f"{head}test_pattern[(a b)]": "passed",
        f"{head}test_jax": "skipped",
        f"{head}test_known": "xfailed",
        f"{head}test_fixed": "xpassed",
        "tests/test_optional.py": "skipped",
    }
    reasons = [j.row.evidence for j in foreign.record().judgements if j.row.value == "skipped"]
    assert reasons == [("could not import 'no_such_module': No module named 'no_such_module'",), ("no jax",)]
    assert "mine: 7 rows: 5 PASS, 2 skipped" in ran.out
    plain = foreign.pytest()
    assert (plain.code, "mine: " in plain.out) == (0, False), "without -m the tests run as before"
    assert "4 passed, 2 skipped, 1 xfailed, 1 xpassed" in plain.out, "test_other is one of them"


def test_failed_test_does_not_report_its_row(foreign: Foreign) -> None:
    foreign.write("tests/test_unchanged.py", TESTS.replace("== 2", "== 3"))
    ran = foreign.pytest("-m", "mine")
    assert ran.code == 1
    (red,) = [j for j in foreign.record().judgements if j.red]
    id = "tests/tests-test_unchanged-test_add/outcome"
    assert (red.row.id, red.label, red.row.value) == (id, "MISSING", None)
    assert "assert (1 + 1) == 3" in red.reason
    assert foreign.record().problems == (), "the row shows it"


def test_lane_whose_tests_are_all_skipped_is_red(foreign: Foreign) -> None:
    foreign.write("tests/test_unchanged.py", SKIPPED_MODULE)
    foreign.write("tests/test_b.py", "import pytest\n@pytest.mark.skip\ndef test_b(): pass\n")
    ran = foreign.pytest("-m", "mine")
    assert ran.code == 1, ran.out
    assert [str(p) for p in foreign.record().problems] == ["all 2 tests were skipped: nothing was checked"]


@pytest.mark.parametrize("workers", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "xdist"])
def test_modules_that_a_helper_skips_are_rows(foreign: Foreign, workers: tuple[str, ...]) -> None:
    """xdist reports only the first module of those that the same line skips."""
    skip = "import pytest\ndef need(): pytest.skip('no gpu', allow_module_level=True)\n"
    foreign.write("tests/helper.py", skip)
    for name in ("x", "y"):
        foreign.write(f"tests/test_{name}.py", "import helper\nhelper.need()\ndef test_a(): pass\n")
    foreign.pytest("-m", "mine", *workers)
    found = {test: value for test, value in values(foreign).items() if "::" not in test}
    assert found == {"tests/test_x.py": "skipped", "tests/test_y.py": "skipped"}


def test_marked_tests_keep_their_rows(foreign: Foreign) -> None:
    foreign.write(
        "tests/test_unchanged.py",
        "import pytest\n\n@pytest.mark.mine\ndef test_a(row):\n"
        "    row.count('a/b/c', 1, unit='n', seen=1, expected=1)\n",
    )
    foreign.pytest("-m", "mine")
    assert foreign.verdicts() == {"a/b/c": "NEW"}


def gated(foreign: Foreign, good: str, bad: str) -> GateVerdict:
    """Judge the records of two versions of the tests."""
    records = []
    for name, text in (("good", good), ("bad", bad)):
        foreign.write("tests/test_unchanged.py", text)
        foreign.pytest("-m", "mine", "--gate", "--record", f"{name}.json")
        records.append(read_record(foreign.root / f"{name}.json"))
    return judge_gate("mine", Side("torch 1", records[0]), Side("torch 2", records[1]))


def test_gate_lists_tests_that_both_sides_skip(foreign: Foreign) -> None:
    verdict = gated(foreign, TESTS, TESTS)
    assert verdict.decision is Decision.ADOPT
    (skipped,) = verdict.findings
    assert (skipped.label, skipped.head) == ("NOT RUN", "no jax")
    assert skipped.rows == ("tests/tests-test_unchanged-test_jax/outcome",)


@pytest.mark.parametrize(
    ("old", "new", "label", "words"),
    [
        ("assert 1 + 1 == 2", "warnings.warn('old', FutureWarning); 1 / 0", "MISSING", "ZeroDivisionError"),
        ("assert 1 + 1 == 2", "pytest.skip('no AVX')", "CHANGED", "no AVX"),
        ("def test_known(): assert 0", "def test_known(): pass", "CHANGED", "xpassed"),
    ],
    ids=["fails", "skips", "passes unexpectedly"],
)
def test_gate_holds_for_an_outcome_of_one_side(
    foreign: Foreign, old: str, new: str, label: str, words: str
) -> None:
    assert old in TESTS
    verdict = gated(foreign, TESTS, TESTS.replace(old, new))
    assert verdict.decision is Decision.HOLD
    (finding,) = [f for f in verdict.findings if f.decision is not Decision.ADOPT]
    assert (finding.label, len(finding.rows)) == (label, 1)
    assert words in " ".join((finding.head, *finding.candidate))


SUBTESTS = """
import pytest
def test_parts(subtests):
    {whole}
    for part in "abc":
        with subtests.test(part):
            if part == "a": pytest.skip("no part a")
            if part == "b": pytest.xfail("known")
            assert part == "c"
def test_other(): pass
"""


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has subtests since 9.0")
def test_skipped_subtest_is_not_the_outcome_of_its_test(foreign: Foreign) -> None:
    verdict = gated(foreign, SUBTESTS.format(whole=""), SUBTESTS.format(whole="pytest.skip('no parts')"))
    assert verdict.decision is Decision.HOLD
    (row,) = [j.row for j in read_record(foreign.root / "good.json").judgements if "parts" in j.row.test]
    assert row.value == "passed, 1 subtest skipped, 1 subtest xfailed"
    assert "no part a" in row.evidence[0]


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has subtests since 9.0")
def test_skipped_subtest_of_a_marked_test_is_red(foreign: Foreign) -> None:
    row = "row.count('a/b/c', 1, unit='n', seen=1, expected=1)"
    body = f"@pytest.mark.mine\ndef test_a(row, subtests):\n    {row}\n    with subtests.test(): pytest.skip('no')\n"
    foreign.write("tests/test_unchanged.py", f"import pytest\n{body}")
    foreign.pytest("-m", "mine", "--gate")
    problems = [str(problem) for problem in foreign.record().problems]
    assert problems == ["tests/test_unchanged.py::test_a: a subtest was skipped under --gate: no"]


def test_failure_of_both_sides_is_no_evidence(foreign: Foreign) -> None:
    broken = TESTS.replace("== 2", "== 3")
    verdict = gated(foreign, broken, broken)
    assert verdict.decision is Decision.UNKNOWN


def test_test_that_was_not_run_has_no_outcome(foreign: Foreign) -> None:
    ran = foreign.pytest("-m", "mine", "--setup-only")
    assert ran.code == 1
    assert "test_unchanged.py::test_add was set up and not run" in ran.out


@pytest.mark.parametrize("narrow", ["tests/test_unchanged.py", "--ignore=tests/test_more.py"])
def test_selection_of_outcomes_is_shown_as_part(foreign: Foreign, narrow: str) -> None:
    foreign.write("tests/test_more.py", "def test_more(): pass\n")
    assert foreign.pytest("-m", "mine", "--gate", "tests").code == 0, "all tests of the lane"
    ran = foreign.pytest("-m", "mine", "--gate", narrow)
    assert ran.code == 1
    assert "part of the lane: 6 rows; add --part if that is intended" in ran.out
    ran = foreign.pytest("-m", "mine", "--gate", "--part", narrow)
    assert ran.code == 0
    assert "5 PASS; part of the lane: 6 rows; device cpu" in ran.out


@pytest.mark.parametrize(
    ("node", "other"),
    [
        ("t.py::test_é", "t.py::test_è"),
        ("ü/t.py::test_a", "ä/t.py::test_a"),
        ("t.py::test_a[b c]", "t.py::test_a[(b c)]"),
        ("t.py::test_a[+]", "t.py::test_a[-]"),
        ("t.py::test_a[c]", "t.py::test_a[c++]"),
        ("t.py::test_a", "t.py::test_a_"),
        ("a/t.py::T::test_[x-1.5-<f>]", "é.py"),
    ],
)
def test_ids_of_similar_names_are_valid_and_differ(node: str, other: str) -> None:
    assert row_id(node) != row_id(other)
    assert re.fullmatch(ROW_ID, row_id(node))
    assert re.fullmatch(ROW_ID, row_id(other))


def test_ids_of_plain_names_have_no_digest() -> None:
    assert row_id("t.py::test_a[3]") == "tests/t-test_a-3/outcome"
    assert row_id("t.py::test_a[-1]") == "tests/t-test_a--1/outcome"


def test_gate_compares_parameters_of_signs_one_by_one(foreign: Foreign) -> None:
    signs = "import pytest\n@pytest.mark.parametrize('sign', '+-')\ndef test_sign(sign):\n    "
    verdict = gated(foreign, f"{signs}pass\n", f"{signs}sign == '+' and pytest.skip('no plus')\n")
    assert verdict.decision is Decision.HOLD


def test_outcomes_of_two_tests_in_one_row_are_red(foreign: Foreign) -> None:
    for path in ("tests/a-b/test_c.py", "tests/a/b/test_c.py"):
        foreign.write(path, "def test_d(): pass\n")
    ran = foreign.pytest("-m", "mine", "--import-mode=importlib")
    assert ran.code == 1
    (problem,) = foreign.record().problems
    assert str(problem) == (
        "tests/a/b/test_c.py::test_d: its row 'tests/tests-a-b-test_c-test_d/outcome' is also that of "
        "tests/a-b/test_c.py::test_d: rename one of them"
    )


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        ("absent", "tests: absent does not exist"),
        ("{root}/tests", r"tests: .* must be a path below the repository"),
        ("tests/../tests", r"tests: .* must be a path below the repository"),
    ],
)
def test_tests_of_a_lane_are_below_the_repository(tmp_path: Path, tests: str, fault: str) -> None:
    """pytest names them relative to the root: no test would belong to another folder."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "bumpgate.toml").write_text(LANE.replace("'tests'", f"'{tests.format(root=tmp_path)}'"))
    with pytest.raises(LaneError, match=fault):
        load(tmp_path)
