"""Rows that need a TPU: on CPU PJRT they are reported as NOT RUN, neither red nor green; on a TPU they are required."""

from __future__ import annotations

from bumpgate.core.baseline import Baseline, Reviewed, save
from tests.support.project import Project

BODY = """
import json
from bumpgate.plugin.rows import NOT_RUN_PROPERTY

@lanes("v6e")
def test_good(lane, row):
    row("compile/good/graph_breaks", 13, expected=13, **COUNT)

@lanes("v6e")
def test_only_there(lane, row, record_property):
    record_property(NOT_RUN_PROPERTY, json.dumps(["compile/there/graph_breaks: no allocator here"]))
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
