"""A reviewed row whose test is gone, a row that no report would carry, a test that never ran: none of them is green."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from suites.support.planted import planted
from tests.support.project import GOOD, Project, counted

RUN = ("-m", "cpu", "-n", "0", "--gate")
TIER = "suites/kernels/interpret"
OTHER = replace(counted("x"), test="suites/model/test_b.py::test_other[cpu]")


@planted("C39", "a test of a tier that is deleted")
def test_lost_test_of_a_tier_is_red(project: Project) -> None:
    """A tier runs in an environment of its own, always by its path, so that no run is a whole one."""
    project.tests(GOOD.replace("good", "tier"), f"{TIER}/test_a.py")
    tier, gone = (
        replace(counted("x"), test=f"{TIER}/test_a.py::test_{name}[cpu]") for name in ("tier", "gone")
    )
    project.baseline(tier=tier, gone=gone)
    result = project.pytest(*RUN, "--part", TIER)
    assert result.code == 1, result.out
    assert project.verdicts() == {"tier": "PASS", "gone": "MISSING"}


@planted("C39", "a test that is deleted, in a run of a part of the lane")
@pytest.mark.parametrize(
    "narrow", [["suites/compile"], ["--fast"], ["-k", "not slow"], ["-m", "cpu and not cold"]], ids=" ".join
)
def test_lost_test_is_red_in_a_part_that_contains_it(project: Project, narrow: list[str]) -> None:
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    project.baseline(good=counted("test_good"), gone=counted("test_gone"), other=OTHER)
    result = project.pytest(*RUN, "--part", *narrow)
    assert result.code == 1, result.out
    assert project.verdicts()["gone"] == "MISSING"
    assert "-> pytest -m cpu\n" in result.out, "a command for a test that does not exist"


def test_affected_run_reports_a_test_that_the_change_removed(project: Project) -> None:
    project.tests(GOOD + GOOD.replace("good", "lost"))
    project.baseline(good=counted("test_good"), lost=counted("test_lost"))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(project.root)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    project.tests(GOOD)
    result = project.pytest(*RUN, "--part", "--affected", "HEAD")
    assert result.code == 1, result.out
    assert project.verdicts() == {"good": "PASS", "lost": "MISSING"}


PARTS = (
    "--fast",
    "-k good",
    "suites/compile",
    "--ignore=suites/compile",
    "--deselect=suites/compile",
    "suites/compile/test_a.py::test_good",
    "-n 2 --fast",
    "-o python_files=test_b.py",
)


@pytest.mark.parametrize("narrow", PARTS)
def test_part_that_leaves_a_test_out_does_not_require_it(project: Project, narrow: str) -> None:
    project.tests(GOOD + GOOD.replace("good", "slow").replace("@lanes", "@pytest.mark.long(9)\n@lanes"))
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    project.baseline(good=counted("test_good"), slow=counted("test_slow"), other=OTHER)
    result = project.pytest(*RUN, "--part", *narrow.split())
    assert result.code == 0, result.out


LATE = """
kept = []

@lanes("cpu")
def test_first(lane, row):
    kept.append(row)
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)

@lanes("cpu")
def test_second(lane):
    kept[0].count("compile/late/graph_breaks", 0, expected=13, **COUNT)
"""
TEARDOWN = """
kept = []

@pytest.fixture(scope="module")
def summed():
    values = []
    yield values
    kept[0].count("compile/late/graph_breaks", sum(values), expected=13, **COUNT)

@lanes("cpu")
def test_first(lane, row, summed):
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)

@lanes("cpu")
@pytest.mark.parametrize("i", [1, 2])
def test_second(lane, row, summed, i):
    kept.append(row)
"""


@planted("C39", "a wrong value that is reported after the end of its test")
@pytest.mark.parametrize("body", [LATE, TEARDOWN], ids=["another test", "module teardown"])
def test_row_reported_after_its_test_is_red(project: Project, body: str) -> None:
    project.tests(body)
    project.baseline(good=counted("test_first"))
    result = project.pytest(*RUN)
    assert result.code == 1, result.out
    assert "compile/late/graph_breaks': reported after suites/compile/test_a.py::test_" in result.out


EMPTY = """
@lanes("cpu")
@pytest.mark.parametrize("dtype", [])
def test_empty(lane, dtype):
    assert False
"""
NEVER = """
@lanes("cpu")
@pytest.mark.xfail(run=False, reason="crashes")
def test_never(lane):
    assert False
"""


@planted("C39", "a test without parameters, and one that pytest does not run")
@pytest.mark.parametrize(
    ("body", "option"),
    [
        (EMPTY, "empty_parameter_set_mark=skip"),
        (EMPTY, "empty_parameter_set_mark=xfail"),
        (NEVER, "xfail_strict=true"),
    ],
    ids=["skip", "xfail", "not run"],
)
def test_test_that_never_ran_is_red_under_gate(project: Project, body: str, option: str) -> None:
    project.tests(GOOD + body)
    project.baseline(good=counted("test_good"))
    result = project.pytest(*RUN, "-o", option)
    assert result.code == 1, result.out


@pytest.mark.parametrize("option", ["--noconftest", "--confcutdir=suites"])
def test_gate_without_the_conftest_is_refused(project: Project, option: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    result = project.pytest(*RUN, option)
    assert result.code == 4, result.out
