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
    assert (result.code, (project.root / file).read_text()) == (4, before), result.out + result.err
    assert f"--record={file}: this file is not a record: name another" in result.err


@pytest.mark.parametrize("base", ["--output=victim", "--no-index", "-O/dev/null"])
def test_commit_of_affected_is_no_option_of_git(project: Project, base: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    project.write("victim", "precious\n")
    GitRepository(project.root).commit("one", {"victim": "precious\n"})
    result = project.pytest(*GATE, f"--affected={base}")
    assert (result.code, (project.root / "victim").read_text()) == (4, "precious\n"), result.out + result.err
    assert "Traceback" not in result.err


def review(project: Project, row: Reviewed) -> None:
    project.baseline()
    path = project.root / "baselines/cpu.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"rows": {ID: row.to_json()}}))


@pytest.mark.parametrize(
    ("better", "value", "tolerance"),
    [("higher", 51.0, 1.0), ("higher", 51.0, 5.0), ("lower", 0.5, 1e299)],
    ids=str,
)
def test_review_that_accepts_any_loss_is_refused(
    project: Project, better: str, value: float, tolerance: float
) -> None:
    project.tests(SPEED.replace("BETTER", better))
    review(project, Reviewed(value, "things", better, tolerance, test=TEST))
    result = project.pytest(*GATE)
    assert result.code in (1, 4), result.out + result.err


@pytest.mark.parametrize("value", ["1e299"])
def test_acceptance_of_any_loss_is_refused(project: Project, value: str) -> None:
    project.tests(SPEED.replace("BETTER", "lower").replace('1.0, "things"', '100.0, "things"'))
    review(project, Reviewed(1.0, "things", "lower", 0.1, test=TEST))
    day = accepted.today()
    entry = f'lane = "cpu"\nrow = "{ID}"\nvalue = {value}\nowner = "ada"\nreason = "why"\n'
    days = f"since = {day}\nexpires = {day + timedelta(days=30)}\n"
    project.write("baselines/accepted.toml", f"[[accepted]]\n{entry}{days}")
    assert project.pytest(*GATE).code in (1, 4)


ROW = Reviewed(14, "breaks", "derived").to_json()


def baseline_of(row: object) -> str:
    """Return a baseline with one row."""
    return json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": row}})


# Name -> content of baselines/cpu.json.
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
    "NaN": baseline_of(ROW | {"value": float("nan")}),
    "1e400": baseline_of(ROW).replace("14", "1e400"),
    "null": baseline_of(ROW | {"value": None}),
    "no id": baseline_of(ROW).replace("a/b/c", "a/../c"),
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
