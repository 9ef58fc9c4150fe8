"""Files and options that a lane reads: none of them is overwritten, believed if it is damaged, or accepts any loss."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import Reviewed
from tests.support.git_repository import GitRepository
from tests.support.project import GOOD, Project, counted

GATE = ("-m", "cpu", "-n", "0", "--gate")
SPEED = """
@lanes("cpu")
def test_speed(lane, row):
    row.cost("compile/speed/tokens", 1.0, "things", seen=3, rule="C6", better="BETTER", tolerance=0.1)
"""
ID = "compile/speed/tokens"
TEST = "suites/compile/test_a.py::test_speed[cpu]"


@pytest.mark.parametrize("file", ["baselines/cpu.json", "pyproject.toml", "suites/compile/test_a.py"])
def test_record_replaces_no_other_file(project: Project, file: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    before = (project.root / file).read_text()
    result = project.pytest(*GATE, f"--record={file}")
    assert (project.root / file).read_text() == before
    assert result.code == 4, result.out + result.err


@pytest.mark.parametrize("base", ["--output=victim", "--no-index", "-O/dev/null"])
def test_commit_of_affected_is_no_option_of_git(project: Project, base: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    project.write("victim", "precious\n")
    GitRepository(project.root).commit("one", {"victim": "precious\n"})
    result = project.pytest(*GATE, f"--affected={base}")
    assert (result.code, (project.root / "victim").read_text()) == (4, "precious\n"), result.out + result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("better", "value", "tolerance"),
    [("higher", 51.0, 1.0), ("higher", 51.0, 5.0), ("lower", 0.5, 1e299)],
    ids=str,
)
def test_review_that_accepts_any_loss_is_refused(
    project: Project, better: str, value: float, tolerance: float
) -> None:
    project.tests(SPEED.replace("BETTER", better))
    reviewed = Reviewed(value, "things", better, tolerance, test=TEST)
    project.baseline()
    path = project.root / "baselines/cpu.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"rows": {ID: reviewed.to_json()}}))
    result = project.pytest(*GATE)
    assert result.code in (1, 4), result.out + result.err


@pytest.mark.parametrize("value", ["1e299"])
def test_acceptance_of_any_loss_is_refused(project: Project, value: str) -> None:
    project.tests(SPEED.replace("BETTER", "lower").replace('1.0, "things"', '100.0, "things"'))
    project.baseline()
    path = project.root / "baselines/cpu.json"
    raw = json.loads(path.read_text())
    path.write_text(
        json.dumps(raw | {"rows": {ID: Reviewed(1.0, "things", "lower", 0.1, test=TEST).to_json()}})
    )
    day = accepted.today()
    entry = f'lane = "cpu"\nrow = "{ID}"\nvalue = {value}\nowner = "ada"\nreason = "why"\n'
    days = f"since = {day}\nexpires = {day + timedelta(days=30)}\n"
    project.write("baselines/accepted.toml", f"[[accepted]]\n{entry}{days}")
    assert project.pytest(*GATE).code in (1, 4)


# Name -> content of baselines/cpu.json.
ROW = {
    "value": 14,
    "unit": "breaks",
    "better": "derived",
    "tolerance": 0.0,
    "note": "",
    "test": "",
    "per_build": False,
}
DAMAGED = {
    "empty": "",
    "cut off": '{"schema": 1, "lane": "cpu", "rows": {',
    "merge conflict": "<<<<<<< HEAD\n{}\n=======\n",
    "not UTF-8": "\udcff",
    "a list": "[]",
    "another schema": '{"schema": 99, "lane": "cpu", "made_with": {}, "rows": {}}',
    "another lane": '{"schema": 1, "lane": "h200", "made_with": {}, "rows": {}}',
    "no rows": '{"schema": 1, "lane": "cpu", "made_with": {}}',
    "a row twice": '{"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": {}, "a/b/c": {}}}',
    "NaN": json.dumps(
        {"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW | {"value": float("nan")}}}
    ),
    "1e400": json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW}}).replace(
        "14", "1e400"
    ),
    "null": json.dumps(
        {"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW | {"value": None}}}
    ),
    "no id": json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/../c": ROW}}),
    "deep": "[" * 100_000,
    "no row of the test": '{"schema": 1, "lane": "cpu", "made_with": {}, "rows": {}}',
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_baseline_is_one_line_or_red(project: Project, what: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    (project.root / "baselines/cpu.json").write_bytes(DAMAGED[what].encode(errors="surrogateescape"))
    result = project.pytest(*GATE)
    assert result.code in (1, 4), result.out
    assert "Traceback" not in result.out + result.err
    if result.code == 4:
        (line,) = [line for line in result.err.splitlines() if line.startswith("ERROR: ")]
        assert "git checkout baselines/cpu.json" in line
