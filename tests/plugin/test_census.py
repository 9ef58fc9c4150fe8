"""A test or a reviewed row that is gone, left out, not run, rerun or reported too late is red, by whatever means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bumpgate.core import census
from bumpgate.core.baseline import BaselineError
from suites.support.planted import planted
from tests.support.git_repository import GitRepository
from tests.support.project import GOOD, Project, counted

RUN = ("-m", "cpu", "-n", "0")
GATE = (*RUN, "--gate")
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
def laws(lane: Project) -> Project:
    """A lane with one row, three tests without rows, and their reviewed set."""
    lane.tests(LAWS, B)
    lane.baseline(good=counted("test_good"))
    lane.write("baselines/cpu.tests", census.text(REVIEWED))
    return lane


@pytest.mark.parametrize("workers", "02")
def test_record_lists_each_collected_test(laws: Project, workers: str) -> None:
    run = laws.pytest("-m", "cpu", "-n", workers, "--deselect", f"{B}::test_other_law")
    assert run.code == 0, run.out
    left_out = {REVIEWED[3]: census.DESELECTED}
    assert laws.record().tests == dict.fromkeys(REVIEWED, census.PASSED) | left_out


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
def test_lost_test_without_rows_is_red(laws: Project, body: str, tests: str, lost: str) -> None:
    """In a run of the whole lane, with or without --gate."""
    path = laws.root / "conftest.py"
    path.write_text(f"{path.read_text()}\n\n{body}")
    laws.tests(tests, B)
    run = laws.pytest("-m", "cpu", "-n", "2" if body == DROP else "0")
    assert run.code == 1, run.out + run.err
    assert lost in run.out
    assert laws.verdicts() == {"good": "PASS"}


@pytest.mark.parametrize("setting", ["testpaths = suites/compile", "python_files = test_a.py"])
def test_setting_that_narrows_the_lane_is_red(laws: Project, setting: str) -> None:
    name, _, value = setting.partition(" = ")
    path = laws.root / "pyproject.toml"
    old = 'testpaths = ["suites"]'
    path.write_text(path.read_text().replace(old, "" if name == "testpaths" else old))
    new = f'[tool.pytest.ini_options]\n{name} = ["{value}"]'
    path.write_text(path.read_text().replace("[tool.pytest.ini_options]", new))
    run = laws.pytest(*GATE)
    assert run.code == 1, run.out + run.err
    assert f"PROBLEM       {B}: 3 tests not collected" in run.out


@pytest.mark.parametrize("part", ["suites/compile", "-k good", f"--deselect={B}", f"{B}::test_other_law"])
def test_part_requires_its_own_tests_only(laws: Project, part: str) -> None:
    run = laws.pytest(*GATE, "--part", *part.split())
    assert run.code == 0, run.out + run.err


def test_part_requires_each_test_that_it_collects(laws: Project) -> None:
    laws.tests(LAWS.replace("test_law", "test_renamed"), B)
    run = laws.pytest(*GATE, "--part", "suites/model")
    assert run.code == 1, run.out
    assert "2 tests not collected: test_law[add-cpu], test_law[mul-cpu]" in run.out


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_gate_refuses_to_set_up_only(laws: Project, option: str) -> None:
    run = laws.pytest(*GATE, "--part", B, option)
    assert run.code == 4, run.out
    assert f"{option} runs no test: leave it out, or leave out --gate" in run.err


def test_lost_and_reviewed_tests() -> None:
    tests = dict(zip("abcdefgh", census.OUTCOMES))
    lost = {"d": "xfailed", "f": "rerun", "g": "not reached", "h": "deselected", "z": "absent"}
    assert census.lost("hgfedcbaz", tests) == lost
    assert census.ran(tests) == {*"abef"}
    assert census.reviewed("xy", tests, whole=True) == {*"abce"}
    assert census.reviewed("xy", tests, whole=False) == {*"abcexy"}
    tier = {"suites/kernels/codegen/test_a.py::test_b": "passed"}
    assert census.reviewed((), tier, whole=True) == frozenset()


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
def test_damaged_file_is_refused(laws: Project, text: str, fault: str) -> None:
    path = laws.root / "baselines/cpu.tests"
    assert census.load(path) == {*REVIEWED}
    assert census.load(path.with_name("none.tests")) == frozenset()
    path.write_text(text)
    with pytest.raises(BaselineError, match=fault):
        census.load(path)
    if "cut off" in fault:
        run = laws.pytest(*GATE)
        assert (run.code, "git checkout baselines/cpu.tests" in run.err) == (4, True)


@planted("C39", "a test of a tier that is deleted")
def test_lost_test_of_a_tier_is_red(project: Project) -> None:
    """A tier runs in an environment of its own, always by its path, so that no run is a whole one."""
    path = "suites/kernels/interpret/test_a.py"
    project.tests(GOOD.replace("good", "tier"), path)
    rows = {name: replace(counted("x"), test=f"{path}::test_{name}[cpu]") for name in ("tier", "gone")}
    project.baseline(**rows)
    result = project.pytest(*GATE, "--part", "suites/kernels/interpret")
    assert result.code == 1, result.out
    assert project.verdicts() == {"tier": "PASS", "gone": "MISSING"}


@planted("C39", "a test that is deleted, in a run of a part of the lane")
@pytest.mark.parametrize(
    "narrow",
    [["suites/compile"], ["--fast"], ["-k", "not slow"], ["-m", "cpu and not cold"], ["--affected", "HEAD"]],
    ids=" ".join,
)
def test_lost_test_is_red_in_a_part_that_contains_it(lane: Project, narrow: list[str]) -> None:
    lane.baseline(good=counted("test_good"), gone=counted("test_gone"))
    lane.tests("", B)
    lane.tests(GOOD + GOOD.replace("good", "gone"))
    if "--affected" in narrow:
        repository = GitRepository(lane.root)
        repository.git("add", "--all")
        repository.commit("base")
    lane.tests(GOOD)
    result = lane.pytest(*GATE, "--part", *narrow)
    assert result.code == 1, result.out
    assert lane.verdicts() == {"good": "PASS", "gone": "MISSING"}
    assert "-> pytest -m cpu\n" in result.out, "a command for a test that does not exist"


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
    result = project.pytest(*GATE)
    assert result.code == 1, result.out
    assert f"compile/late/graph_breaks': reported after {A}::test_" in result.out


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
    result = project.pytest(*GATE, "-o", option)
    assert result.code == 1, result.out
