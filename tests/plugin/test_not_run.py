"""Rows that need a TPU: on CPU PJRT they are reported as NOT RUN, neither red nor green; on a TPU they are required."""

from __future__ import annotations

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, save
from tests.support.project import Project

BODY = """
@lanes("v6e")
def test_good(lane, row):
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)

@lanes("v6e")
def test_only_there(lane, row):
    row.not_run(["compile/there/graph_breaks"], "no allocator here")
    pytest.skip("not run")
"""


def project_on(project: Project, device: str) -> None:
    """Create a v6e lane with one measured row and one that needs a TPU, both reviewed."""
    project.write("torch_xla/__init__.py", "")
    project.write("torch_xla/core/__init__.py", "")
    project.write("torch_xla/core/xla_model.py", "def xla_device_kind(): return 'TPU v6 lite'\n")
    project.write("torch_xla/runtime.py", f"def device_type(): return {device!r}\n")
    tests = {"good": "test_good", "there": "test_only_there"}
    rows = {
        f"compile/{case}/graph_breaks": Reviewed(
            13, "breaks", "derived", test=f"suites/compile/test_a.py::{test}[v6e]"
        )
        for case, test in tests.items()
    }
    project.tests(BODY)
    save(project.root / "baselines/v6e.json", Baseline("v6e", {"torch": "9.9.0"}, rows))


def test_cpu_pjrt_reports_tpu_only_rows_as_not_run(project: Project) -> None:
    project_on(project, "CPU")
    for arguments in ((), ("--gate",)):
        done = project.pytest("-m", "v6e", "-n", "0", *arguments)
        assert done.code == 0, done.out
        assert "NOT RUN       compile/there/graph_breaks: no allocator here" in done.out
        assert "1 row: 1 PASS; 1 NOT RUN: no v6e here; device pjrt-cpu" in done.out
        assert project.verdicts() == {"good": "PASS"}


def test_tpu_under_gate_requires_tpu_only_rows(project: Project) -> None:
    project_on(project, "TPU")
    done = project.pytest("-m", "v6e", "-n", "0", "--gate")
    assert done.code == 1
    assert "not run under --gate: compile/there/graph_breaks" in done.out
    assert "device v6e" in done.out


PARTS = """
@lanes("cpu")
def test_parts(lane, row):
    row.count("compile/here/graph_breaks", 1, expected=1, **COUNT)
    row.not_run(["compile/first/graph_breaks"], "needs a driver of R600 or later", excused={first})
    row.not_run(["compile/second/graph_breaks", "compile/third/graph_breaks"], "needs NVLink", excused=True)
"""


@pytest.mark.parametrize(("first", "code"), [(True, 0), (False, 1)])
def test_rows_that_cannot_be_measured_are_listed(project: Project, first: bool, code: int) -> None:
    """Under --gate one reason that is not excused makes the test red."""
    project.tests(PARTS.format(first=first))
    project.pytest("-m", "cpu", "-n", "0")
    project.bumpgate("rebaseline", "--lane", "cpu")
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    done = project.pytest("-m", "cpu", "-n", "0", "--gate")
    assert done.code == code, done.out
    assert "NOT RUN       compile/first/graph_breaks: needs a driver of R600 or later" in done.out
    assert "NOT RUN       compile/third/graph_breaks: needs NVLink" in done.out
    assert "3 NOT RUN" in done.out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('row.not_run("compile/a/b", "r")', "not_run: ids must be a list of row ids, got 'compile/a/b'"),
        ('row.not_run([], "r")', "not_run: ids must be a list of row ids, got []"),
        ('row.not_run(["compile/a/graph_breaks"], "r")', "not run, but already reported by"),
    ],
)
def test_wrong_list_of_rows_is_an_error(project: Project, call: str, message: str) -> None:
    body = """
@lanes("cpu")
def test_a(lane, row):
    row.count("compile/a/graph_breaks", 1, expected=1, **COUNT)
"""
    project.tests(f"{body}    {call}\n")
    done = project.pytest("-m", "cpu", "-n", "0")
    assert done.code == 1
    assert message in done.out
