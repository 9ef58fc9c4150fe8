"""The census: a test without rows that is gone, left out, not run or rerun is red, by whatever means."""

from __future__ import annotations

import pytest

from bumpgate.core import census
from bumpgate.core.baseline import BaselineError
from suites.support.planted import planted
from tests.support.project import GOOD, Project, counted

GATE = ("-m", "cpu", "-n", "0", "--gate")
A, B = "suites/compile/test_a.py", "suites/model/test_b.py"
LAWS = """
@lanes("cpu")
@pytest.mark.parametrize("op", ["add", "mul"])
def test_law(lane, op):
    pass

@lanes("cpu")
def test_other_law(lane):
    pass
"""
REVIEWED = (
    f"{A}::test_good[cpu]",
    f"{B}::test_law[add-cpu]",
    f"{B}::test_law[mul-cpu]",
    f"{B}::test_other_law[cpu]",
)
BROKEN = LAWS.replace("    pass", "    assert False")


@pytest.fixture
def lane(project: Project) -> Project:
    """A lane with one row, three tests without rows, and their reviewed set."""
    project.tests(GOOD)
    project.tests(LAWS, B)
    project.baseline(good=counted("test_good"))
    project.write("baselines/cpu.tests", census.text(REVIEWED))
    return project


def conftest(lane: Project, body: str) -> None:
    path = lane.root / "conftest.py"
    path.write_text(f"{path.read_text()}\n\n{body}")


@pytest.mark.parametrize("workers", "02")
def test_record_lists_each_collected_test(lane: Project, workers: str) -> None:
    run = lane.pytest("-m", "cpu", "-n", workers, "--deselect", f"{B}::test_other_law")
    assert run.code == 0, run.out
    left_out = {REVIEWED[3]: census.DESELECTED}
    assert lane.record().tests == dict.fromkeys(REVIEWED, census.PASSED) | left_out


DROP = """
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "law" not in item.name]
"""
DESELECT = """
def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for item in items if "law" in item.name])
    items[:] = [item for item in items if "law" not in item.name]
"""
PASSES = """
def pytest_pyfunc_call(pyfuncitem):
    return True if "law" in pyfuncitem.name else None
"""
FLIPS = """
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.outcome, report.longrepr = "passed", None
    return report
"""
RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        reports[1].outcome = "rerun"
        item.ihook.pytest_runtest_logreport(report=reports[1])
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
FIRST_FAILS = """
attempts = []

@lanes("cpu")
def test_other_law(lane):
    attempts.append(1)
    assert len(attempts) > 1
"""


@planted("C39", "a test without rows that a plugin, conftest or setting leaves out or passes")
@pytest.mark.parametrize(
    ("body", "tests", "lost"),
    [
        (DROP, LAWS, "3 tests collected and not run"),
        (DESELECT, LAWS, "3 tests deselected"),
        (PASSES, BROKEN, "without calling its function"),
        (FLIPS, BROKEN, "raised in its call, and a plugin or conftest reports passed"),
        (RERUNS, FIRST_FAILS, "a plugin ran the test again"),
        ("", LAWS.replace("test_law", "test_renamed"), "2 tests not collected: test_law[add-cpu]"),
        ("", LAWS.replace('"mul"', ""), "::test_law[mul-cpu]: 1 test not collected"),
        ("", LAWS.replace('@lanes("cpu")', "").replace("lane, op", "op").replace("(lane)", "()"), "3 tests"),
        ("", LAWS.replace("    pass", "    pytest.xfail('x')"), "3 tests failing as xfail expects"),
    ],
    ids=["dropped", "deselected", "passed", "flipped", "rerun", "renamed", "parameter", "marker", "xfail"],
)
def test_lost_test_without_rows_is_red(lane: Project, body: str, tests: str, lost: str) -> None:
    """In a run of the whole lane, with or without --gate."""
    conftest(lane, body)
    lane.tests(tests, B)
    workers = "2" if body == DROP else "0"
    run = lane.pytest("-m", "cpu", "-n", workers)
    assert run.code == 1, run.out + run.err
    assert lost in run.out
    assert lane.verdicts() == {"good": "PASS"}


@pytest.mark.parametrize("setting", ["testpaths = suites/compile", "python_files = test_a.py"])
def test_setting_that_narrows_the_lane_is_red(lane: Project, setting: str) -> None:
    name, _, value = setting.partition(" = ")
    path = lane.root / "pyproject.toml"
    old = 'testpaths = ["suites"]'
    path.write_text(path.read_text().replace(old, "" if name == "testpaths" else old))
    new = f'[tool.pytest.ini_options]\n{name} = ["{value}"]'
    path.write_text(path.read_text().replace("[tool.pytest.ini_options]", new))
    run = lane.pytest(*GATE)
    assert run.code == 1, run.out + run.err
    assert f"PROBLEM       {B}: 3 tests not collected" in run.out


def test_renamed_file_is_red(lane: Project) -> None:
    (lane.root / B).rename(lane.root / "suites/model/test_c.py")
    assert lane.pytest(*GATE).code == 1


@pytest.mark.parametrize(
    "part", ["suites/compile", "-k good", "--fast", f"--deselect={B}", f"{B}::test_other_law"]
)
def test_part_requires_its_own_tests_only(lane: Project, part: str) -> None:
    run = lane.pytest(*GATE, "--part", *part.split())
    assert run.code == 0, run.out + run.err


def test_part_requires_each_test_that_it_collects(lane: Project) -> None:
    lane.tests(LAWS.replace("test_law", "test_renamed"), B)
    run = lane.pytest(*GATE, "--part", "suites/model")
    assert run.code == 1, run.out
    assert "2 tests not collected: test_law[add-cpu], test_law[mul-cpu]" in run.out


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_gate_refuses_to_set_up_only(lane: Project, option: str) -> None:
    run = lane.pytest(*GATE, "--part", B, option)
    assert run.code == 4, run.out
    assert f"{option} runs no test: leave it out, or leave out --gate" in run.err


def test_lost_and_reviewed_tests() -> None:
    tests = dict(zip("abcdefgh", census.OUTCOMES))
    assert census.lost("hgfedcbaz", tests) == {
        "d": "xfailed",
        "f": "rerun",
        "g": "not reached",
        "h": "deselected",
        "z": "absent",
    }
    assert census.ran(tests) == {*"abef"}
    assert census.reviewed("xy", tests, whole=True) == {*"abce"}
    assert census.reviewed("xy", tests, whole=False) == {*"abcexy"}
    tier = {"suites/kernels/codegen/test_a.py::test_b": "passed"}
    assert census.reviewed((), tier, whole=True) == frozenset()


def test_file_is_written_as_it_is_read(lane: Project) -> None:
    path = lane.root / "baselines/cpu.tests"
    assert census.load(path) == {*REVIEWED}
    assert census.load(path.with_name("none.tests")) == frozenset()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("b::b\na::a\n", "line 2: must hold sorted node ids, got 'a::a'"),
        ("a::a\na::a\n", "line 2"),
        ("a::a\n<<<<<<< HEAD\nb::b\n", "line 2"),
        ("a::a\n\nb::b\n", "line 2"),
        ("a::a\nb::", "its last line is cut off"),
    ],
)
def test_damaged_file_is_refused(lane: Project, text: str, fault: str) -> None:
    path = lane.root / "baselines/cpu.tests"
    path.write_text(text)
    with pytest.raises(BaselineError, match=fault):
        census.load(path)
    run = lane.pytest(*GATE)
    assert (run.code, "git checkout baselines/cpu.tests" in run.err) == (4, True)
