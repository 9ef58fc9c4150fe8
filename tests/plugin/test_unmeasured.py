"""Rows that a run did not measure although their tests exist: red with the reason, and never pruned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bumpgate.core.baseline import Baseline, save
from bumpgate.core.rows import ProblemKind
from tests.support.project import GOOD, Project, counted

RUN = ("-m", "cpu", "-n", "0")
DESELECTS = """
def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[items.pop()])
"""
SKIPPED_MODULE = "pytest.importorskip('no_such_module')\n" + GOOD
EXPECTED_FAILURE = GOOD.replace("@lanes", "@pytest.mark.xfail\n@lanes").replace(
    "    row.count(", "    assert 0\n    row.count("
)
TEST = "suites/compile/test_a.py::test_good[cpu]"


@pytest.mark.parametrize(
    ("tests", "conftest", "option", "reason"),
    [
        (GOOD, DESELECTS, "--strict-markers", f"{TEST} was deselected"),
        (GOOD, "", "--setup-only", f"{TEST} was set up and not run"),
        (SKIPPED_MODULE, "", "--strict-markers", "suites/compile/test_a.py was skipped: could not import"),
        (
            EXPECTED_FAILURE,
            "",
            "--strict-markers",
            f"not reported by {TEST}, which fails as its mark xfail expects",
        ),
    ],
    ids=["deselected", "set up", "skipped module", "expected failure"],
)
def test_row_of_an_existing_test_is_not_pruned(
    project: Project, tests: str, conftest: str, option: str, reason: str
) -> None:
    project.tests(tests)
    project.tests(GOOD.replace("good", "other"), "suites/another/test_b.py")
    project.write("suites/compile/conftest.py", conftest)
    project.baseline(good=counted("test_good"))
    assert project.pytest(*RUN, option).code == 1
    assert reason in project.reason("good")
    pruned = project.bumpgate("rebaseline", "--lane", "cpu", "--prune", "--dry-run")
    assert "nothing measures it" not in pruned.out


def test_run_of_the_last_failures_is_a_part(project: Project) -> None:
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    project.baseline(good=counted("test_good"))
    with_cache = ("-m", "cpu", "-o", "addopts=-p bumpgate.plugin")
    assert project.pytest(*with_cache).code == 1, "other is not reviewed"
    assert project.bumpgate("rebaseline", "--lane", "cpu").code == 0
    result = project.pytest(*with_cache, "--lf")
    assert result.code == 0, result.out
    assert "part of the lane: 1 of 2 rows" in result.out
    assert "needs the record of a whole run" in project.bumpgate("rebaseline", "--lane", "cpu", "--prune").err


def test_disturbed_test_without_reviewed_rows_is_no_failure(project: Project) -> None:
    project.tests("""
@lanes("cpu")
def test_start(lane, row):
    raise InfraError("other processes used this machine")
""")
    assert project.pytest(*RUN).code == 1
    (problem,) = project.record().problems
    assert problem.kind is ProblemKind.INFRA
    assert problem.why == "InfraError: other processes used this machine"


def test_too_many_open_files_is_not_the_machines_fault(project: Project) -> None:
    """A process that runs out of file descriptors may leak them: such a test is not repeated, and its row is red."""
    project.tests("""
        @lanes("cpu")
        def test_leak(lane, row):
            raise OSError(24, "Too many open files")
        """)
    rows = {"compile/leak/graph_breaks": counted("test_leak")}
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.8.0"}, rows))
    result = project.pytest("-m", "cpu", "-n", "0")
    assert (result.code, project.verdicts()) == (1, {"leak": "MISSING"}), result.out


@pytest.mark.parametrize("paths", ["packages/*/tests", "packages/a packages/b absent"])
def test_lost_row_is_missing_with_patterns_of_testpaths(project: Project, paths: str) -> None:
    """A run without arguments is whole, also if testpaths has patterns or names a folder that does not exist."""
    config = (project.root / "pyproject.toml").read_text()
    assert 'testpaths = ["suites"]' in config
    project.write("pyproject.toml", config.replace('["suites"]', f"{paths.split()}"))
    project.tests(GOOD, path="packages/a/tests/test_a.py")
    gone = replace(counted("test_gone"), test="packages/b/tests/test_b.py::test_gone[cpu]")
    project.baseline(good=counted("test_good"), gone=gone)
    project.write("packages/b/tests/test_c.py", "")
    assert project.pytest(*RUN).code == 1
    assert project.verdicts() == {"good": "PASS", "gone": "MISSING"}
