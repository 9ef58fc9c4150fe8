"""Verbs of the fixture `row` that need more than a value: known defects, rows not run, limits of time."""

from __future__ import annotations

from importlib import metadata

import pytest

from bumpgate.core import census
from bumpgate.core.baseline import Baseline, Reviewed, save
from tests.support.project import Project

RUN = ("-m", "cpu", "-n", "0")
DEFECT = """
@lanes("cpu")
def test_defect_{i}(lane, row):
    row.defect("compile/known-{i}/defect", {present}, known_in="{known}", reason="see #1", witness=1, rule="C6")
"""


def test_defect_is_expected_in_the_versions_of_its_package(project: Project) -> None:
    packaging = metadata.version("packaging")
    cases = [
        ("torch>=9.9,<10", "9.9.0", 1),  # the project's torch
        ("torch<9.9", "9.9.0", 0),
        ("packaging>=20,<1000", packaging, 1),
        ("packaging<1", packaging, 0),
        ("bump>=2.16,<3", "2.16.0.dev20260101", 1),  # it leads to 2.16.0
        ("bump<2.16", "2.16.0.dev20260101", 0),
    ]
    metadata_of = project.root / "bump-2.16.0.dev20260101.dist-info" / "METADATA"
    metadata_of.parent.mkdir()
    metadata_of.write_text("Metadata-Version: 2.1\nName: bump\nVersion: 2.16.0.dev20260101\n")
    project.tests(
        "".join(DEFECT.format(i=i, present=1, known=known) for i, (known, _, _) in enumerate(cases))
    )
    project.pytest(*RUN)
    for found, (known, version, limit) in zip(project.record().judgements, cases, strict=True):
        assert (found.row.value, found.row.at_most) == (1, limit)
        assert found.row.evidence == (f"known in {known}, installed {version}: see #1",)
        assert (found.verdict.value == "REGRESSION") is (limit == 0)


WRONG = {
    'row.defect("compile/a/b", 1, known_in="no-such<2", reason="r")': "known_in 'no-such<2'",
    'row.defect("compile/a/b", 1, known_in="torch=>2", reason="r")': "known_in 'torch=>2'",
    # A share of wrong values is no answer: 0.5 would be read as absent.
    **{
        f'row.defect("compile/a/b", {present}, known_in="torch<9.9", reason="r")': "present must be True or False"
        for present in ("0.5", "float('nan')", "2")
    },
    'row.not_run("compile/a/b", "r")': "not_run: ids must be a list of row ids, got 'compile/a/b'",
    'row.not_run([], "r")': "not_run: ids must be a list of row ids, got []",
    'row.not_run(["compile/a-0/graph_breaks"], "r")': "not run, but already reported by",
    'row.count("compile/a/b", 1, seen=1, instruments="graphs")': "instruments must be a list of strings, got 'graphs'",
}


def test_wrong_call_is_an_error_of_its_test(project: Project) -> None:
    """Each in one line, and without a row of its own."""
    test = '@lanes("cpu")\ndef test_{i}(lane, row):\n'
    test += '    row.count("compile/a-{i}/graph_breaks", 1, expected=1, **COUNT)\n    {call}\n'
    calls = [call.replace("a-0", f"a-{i}") for i, call in enumerate(WRONG)]
    project.tests("".join(test.format(i=i, call=call) for i, call in enumerate(calls)))
    done = project.pytest(*RUN)
    assert f"{len(WRONG)} failed" in done.out, done.out
    for message in WRONG.values():
        assert message in done.out
    assert [j.row.id for j in project.record().judgements] == [
        f"compile/a-{i}/graph_breaks" for i in range(9)
    ]


V6E = """
@lanes("v6e")
def test_good(lane, row):
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)

@pytest.fixture
def allocator(row):
    row.not_run(["compile/there/graph_breaks"], "no allocator here")
    pytest.skip("not run")

@lanes("v6e")
def test_only_there(lane, allocator):
    pass
"""


def on_v6e(project: Project, device: str) -> None:
    """Create a v6e lane with one measured row and one that needs a TPU, both reviewed."""
    project.write("torch_xla/__init__.py", "")
    project.write("torch_xla/core/__init__.py", "")
    project.write("torch_xla/core/xla_model.py", "def xla_device_kind(): return 'TPU v6 lite'\n")
    project.write("torch_xla/runtime.py", f"def device_type(): return {device!r}\n")
    project.tests(V6E)
    file = "suites/compile/test_a.py"
    rows = {
        f"compile/{case}/graph_breaks": Reviewed(13, "breaks", "derived", test=f"{file}::{test}[v6e]")
        for case, test in (("good", "test_good"), ("there", "test_only_there"))
    }
    save(project.root / "baselines/v6e.json", Baseline("v6e", {"torch": "9.9.0"}, rows))
    project.write("baselines/v6e.tests", census.text(row.test for row in rows.values()))


def test_cpu_pjrt_reports_tpu_only_rows_as_not_run(project: Project) -> None:
    """Neither red nor green; a TPU is required to report them."""
    on_v6e(project, "CPU")
    for arguments in ((), ("--gate",)):
        done = project.pytest("-m", "v6e", "-n", "0", *arguments)
        assert done.code == 0, done.out
        assert "NOT RUN       compile/there/graph_breaks: no allocator here" in done.out
        assert "1 row: 1 PASS; 1 NOT RUN: no v6e here; device pjrt-cpu" in done.out
        assert project.verdicts() == {"good": "PASS"}
    on_v6e(project, "TPU")
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
    project.pytest(*RUN)
    project.bumpgate("rebaseline", "--lane", "cpu")
    assert project.pytest(*RUN).code == 0
    done = project.pytest(*RUN, "--gate")
    assert done.code == code, done.out
    assert "NOT RUN       compile/first/graph_breaks: needs a driver of R600 or later" in done.out
    assert "NOT RUN       compile/third/graph_breaks: needs NVLink" in done.out
    assert "3 NOT RUN" in done.out


LIMIT = """
@lanes("cpu")
@pytest.mark.parametrize("i", range(2))
def test_limit(i, lane, row):
    row.bound(f"compile/limit-{i}/NAME", 1.0, "s", seen=1, rule="C37", at_most=2)
"""


@pytest.mark.parametrize(
    ("name", "workers", "refused"), [("seconds", 2, True), ("seconds", 0, False), ("cpu_seconds", 2, False)]
)
def test_limit_of_wall_time_next_to_other_workers_is_refused(
    project: Project, name: str, workers: int, refused: bool
) -> None:
    project.tests(LIMIT.replace("NAME", name))
    done = project.pytest("-m", "cpu", "-n", str(workers))
    assert ("at_most limits seconds of wall time next to other workers" in done.out) is refused, done.out
