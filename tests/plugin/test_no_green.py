"""Attempts to make a lane look green without measuring it, each with the real command: none exits 0."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import Reviewed
from bumpgate.core.rows import read_record
from bumpgate.process.runner import child_environment, run_lane
from tests.support.project import GOOD, Project, counted

GATE = ("-m", "cpu", "-n", "0", "--gate")
NARROW = [
    "--ignore=suites/model",
    "--ignore-glob=*/model/*",
    "--deselect=suites/model",
    "-k good",
    "suites/compile",
    "-o norecursedirs=model",
]


@pytest.fixture
def lane(project: Project) -> Project:
    """A project with two tests in two folders, and their reviewed rows: green if run completely."""
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    other = Reviewed(13, "breaks", "derived", test="suites/model/test_b.py::test_other[cpu]")
    project.baseline(good=counted("test_good"), other=other)
    return project


def test_complete_lane_is_green_under_gate(lane: Project) -> None:
    result = lane.pytest(*GATE)
    assert result.code == 0, result.out + result.err
    assert "part of the lane" not in result.out


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("place", ["PYTEST_ADDOPTS", "command line"])
def test_undeclared_part_is_red_under_gate(lane: Project, narrow: str, place: str) -> None:
    if place == "command line":
        result = lane.pytest(*GATE, *narrow.split())
    else:
        result = lane.pytest(*GATE, PYTEST_ADDOPTS=narrow)
    assert result.code == 1, result.out + result.err
    assert "part of the lane: 1 of 2 rows; add --part" in result.out


@pytest.mark.parametrize(
    "narrow", ["--ignore=suites/model", "--deselect=suites/model", "-k other", "suites/compile"]
)
def test_part_without_tests_that_have_no_row_is_red(project: Project, narrow: str) -> None:
    """A left-out test without a reviewed row: its assertions count, too."""
    project.tests(GOOD.replace("good", "other"))
    project.tests("@lanes('cpu')\ndef test_law(lane):\n    assert False\n", "suites/model/test_b.py")
    project.baseline(other=counted("test_other"))
    result = project.pytest(*GATE, *narrow.split())
    assert result.code == 1, result.out + result.err
    assert "part of the lane: all 1 reviewed rows, but not all tests; add --part" in result.out
    assert project.pytest(*GATE, *narrow.split(), "--part").code == 0


def test_paths_of_all_tests_of_the_lane_are_no_part(lane: Project) -> None:
    lane.tests("def test_of_no_lane():\n    pass\n", "suites/others/test_c.py")
    result = lane.pytest(*GATE, "suites/compile", "suites/model")
    assert result.code == 0, result.out + result.err
    assert "part of the lane" not in result.out


def test_declared_part_is_green_and_shown_as_part(lane: Project) -> None:
    for selection in (["-k", "good"], ["suites/compile"], ["--ignore=suites/model"]):
        result = lane.pytest(*GATE, "--part", *selection)
        assert result.code == 0, result.out + result.err
        assert "cpu: 1 row: 1 PASS; part of the lane: 1 of 2 rows; device cpu" in result.out
    assert lane.record().provenance["part"] == [1, 2]


def test_part_without_gate_is_shown_as_part(lane: Project) -> None:
    result = lane.pytest("-m", "cpu", "-n", "1", "suites/compile")
    assert result.code == 0
    assert "part of the lane: 1 of 2 rows" in result.out


def test_declared_part_does_not_excuse_a_lost_row(lane: Project) -> None:
    lane.baseline(good=counted("test_good"), lost=counted("test_lost"))
    result = lane.pytest(*GATE, "--part")
    assert result.code == 1
    assert "its test is gone" in lane.reason("lost")


def test_gate_child_declares_a_selection_only(lane: Project) -> None:
    run = run_lane(
        Path(sys.executable), lane.root, "cpu", ["suites/compile"], lane.root / "a.json", check_import=False
    )
    assert run.record
    assert not run.record.red
    assert run.record.provenance["part"] == [1, 2]
    run = run_lane(Path(sys.executable), lane.root, "cpu", [], lane.root / "b.json", check_import=False)
    assert run.record
    assert "part" not in run.record.provenance


@pytest.mark.parametrize(
    "lost", ["bumpgate-session", "bumpgate-selection", "bumpgate-rows", "bumpgate.plugin"]
)
@pytest.mark.parametrize("flags", [GATE, GATE[:-1]], ids=["gate", "no gate"])
def test_blocked_plugin_is_refused(lane: Project, lost: str, flags: tuple[str, ...]) -> None:
    for arguments, env in (((*flags, "-p", f"no:{lost}"), {}), (flags, {"PYTEST_ADDOPTS": f"-p no:{lost}"})):
        result = lane.pytest(*arguments, **env)
        assert result.code == 4, result.out + result.err
        record = lane.root / "record.json"
        assert not record.exists() or not lane.record().complete


@pytest.mark.parametrize(
    "instead", ["--collect-only", "--fixtures", "--markers", "--help", "--version --version"]
)
def test_gate_that_judges_nothing_exits_with_4(lane: Project, instead: str) -> None:
    result = lane.pytest(*GATE, PYTEST_ADDOPTS=instead)
    assert result.code == 4, result.out + result.err
    assert "ERROR: " in result.err


@pytest.mark.parametrize("instead", ["--setup-only", "--setup-plan", "--noconftest"])
def test_gate_that_runs_no_test_is_red(lane: Project, instead: str) -> None:
    assert lane.pytest(*GATE, PYTEST_ADDOPTS=instead).code != 0


EXITS = """
@lanes("cpu")
def test_good(lane, row):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)
"""


def test_child_of_a_test_may_exit(lane: Project) -> None:
    lane.tests(EXITS)
    assert lane.pytest(*GATE).code == 0


FAILS = (
    "import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_call(item):\n    assert False\n\n"
)
CONFTESTS = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "atexit": f"import atexit, os\natexit.register(os._exit, 0)\n{FAILS}",
    "exitstatus": f"{FAILS}@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(session):\n"
    "    session.exitstatus = 0\n",
    "unconfigure": f"import os\n{FAILS}def pytest_unconfigure():\n    os._exit(0)\n",
}
CALLS = {
    "os._exit": "os._exit(0)",
    "exit of C": "__import__('ctypes').CDLL(None).exit(0)",
    "_exit of C": "__import__('ctypes').CDLL(None)._exit(0)",
    "execv": "os.execv('/bin/true', ['true'])",
}


@pytest.mark.parametrize(
    ("conftest", "call"),
    [*((text, "") for text in CONFTESTS.values()), *(("", call) for call in CALLS.values())],
    ids=[f"conftest {name}" for name in CONFTESTS] + [f"test {name}" for name in CALLS],
)
def test_exit_with_0_is_red_under_gate(lane: Project, conftest: str, call: str) -> None:
    """Whatever ends the process with 0, its parent finds no complete green record; not the one of an older run."""
    assert lane.pytest(*GATE).code == 0
    lane.write("suites/conftest.py", conftest)
    lane.tests(f"{GOOD}    {call}\n" if call else GOOD)
    result = lane.pytest(*GATE)
    assert result.code in (1, 3, 4), result.out + result.err
    assert lane.record().red


@pytest.mark.parametrize("broken", ["import nothing_of_this_name", "import os; os.kill(os.getpid(), 9)"])
def test_run_that_ends_early_leaves_no_older_record(lane: Project, broken: str) -> None:
    assert lane.pytest(*GATE).code == 0
    lane.write("suites/conftest.py", broken)
    assert lane.pytest(*GATE[:-1]).code in (4, -9)
    assert not lane.record().complete


def test_signal_to_the_parent_alone_ends_the_run(lane: Project) -> None:
    lane.tests(GOOD + "    open('began', 'w').close()\n    time.sleep(100)\n")
    process = lane.start("-m", "pytest", *GATE)
    while not (lane.root / "began").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert not lane.record().complete


@pytest.mark.parametrize("path", ["baselines/cpu.json", "pyproject.toml", "suites/model/test_b.py"])
def test_record_replaces_nothing_but_a_record(lane: Project, path: str) -> None:
    before = (lane.root / path).read_bytes()
    result = lane.pytest(*GATE, f"--record={path}")
    assert (result.code, (lane.root / path).read_bytes()) == (4, before)
    assert f"--record={path}: this file is not a record: name another" in result.err


def test_variables_of_bumpgate_need_bumpgate_itself_as_their_parent(lane: Project) -> None:
    """Process 1 is an ancestor of every process."""
    result = lane.pytest(*GATE, BUMPGATE_UNTIMED="1", BUMPGATE_PARENT="1")
    assert result.code == 4, result.out
    assert "only bumpgate sets them" in result.err


def test_forked_child_writes_no_record(lane: Project) -> None:
    """A child that returns into the test continues the run, and its rows are not the run's."""
    lane.tests(EXITS.replace("os._exit(0)", "return").replace("13, expected", "14, expected"))
    result = lane.pytest(*GATE)
    assert result.code == 1
    assert result.out.count("record: ") == 1
    assert lane.verdicts()["good"] == "REGRESSION"


def test_lane_without_rows_is_red_under_gate(lane: Project) -> None:
    for path in ("suites/compile/test_a.py", "suites/model/test_b.py"):
        lane.tests(GOOD.partition("    row.count(")[0] + "    pass\n", path)
    (lane.root / "baselines/cpu.json").unlink()
    result = lane.pytest(*GATE)
    assert result.code == 1
    assert "PROBLEM       no test of the lane reports a row: nothing was checked" in result.out


def test_run_without_a_terminal_is_judged(lane: Project) -> None:
    assert lane.pytest(*GATE, "-p", "no:terminal").code == 0
    lane.tests(GOOD.replace('graph_breaks", 13', 'graph_breaks", 14'))
    assert lane.pytest(*GATE, "-p", "no:terminal").code == 1
    assert lane.verdicts()["good"] == "REGRESSION"


def test_optimised_python_is_refused(lane: Project) -> None:
    for flags in (GATE, GATE[:-1]):
        result = lane.pytest(*flags, PYTHONOPTIMIZE="1")
        assert result.code == 4
        assert result.err.startswith("ERROR: PYTHONOPTIMIZE or -O removes")
    process = lane.start("-O", "-m", "pytest", *GATE)
    process.communicate(timeout=120)
    assert process.returncode == 4
    process = lane.start("-O", "-c", "from bumpgate.cli import main; main()", "gate", "--lane", "cpu")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.count("\n")) == (4, 1)
    assert "PYTHONOPTIMIZE" in err


def test_children_of_a_gate_lose_pythonoptimize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert "PYTHONOPTIMIZE" not in child_environment(Path(sys.executable), tmp_path)


@pytest.mark.parametrize(
    ("what", "days", "message"),
    [
        ("value = 14", 400, "at most 366 days later"),
        ("value = 14", -1, "at most 366 days later"),
        ("ratio = 1000.0", 30, "at most 2, got 1000.0"),
        ("ratio = 0.5", 30, "above 1"),
    ],
)
def test_hand_edited_acceptance_is_refused(lane: Project, what: str, days: int, message: str) -> None:
    today = accepted.today()
    entry = f'lane = "cpu"\nrow = "compile/good/graph_breaks"\n{what}\nowner = "ada"\nreason = "why"\n'
    days_of = f"since = {today}\nexpires = {today + timedelta(days=days)}\n"
    lane.write("baselines/accepted.toml", f"[[accepted]]\n{entry}{days_of}")
    result = lane.pytest(*GATE)
    assert result.code == 4, result.out
    assert message in result.err


def test_acceptance_that_starts_in_the_future_is_refused(lane: Project) -> None:
    day = accepted.today() + timedelta(days=300)
    entry = 'lane = "cpu"\nrow = "compile/good/graph_breaks"\nvalue = 14\nowner = "ada"\nreason = "why"\n'
    lane.write("baselines/accepted.toml", f"[[accepted]]\n{entry}since = {day}\nexpires = {day}\n")
    assert lane.pytest(*GATE).code == 4


def test_rebaseline_refuses_a_record_of_other_sources(lane: Project) -> None:
    lane.baseline(good=counted("test_good"))
    assert lane.pytest("-m", "cpu", "-n", "0").code == 1, "a row without a reviewed value"
    lane.write("suites/compile/helper.py", "X = 1\n")
    refused = lane.bumpgate("rebaseline", "--lane", "cpu")
    assert refused.code == 1
    assert "measured from other sources" in refused.err
    assert len(refused.err.splitlines()) == 1
    (lane.root / "suites/compile/helper.py").unlink()
    lane.write("README.md", "a document is not measured\n")
    assert lane.bumpgate("rebaseline", "--lane", "cpu", "--dry-run").code == 0
    lane.write("suites/compile/helper.py", "X = 2\n")
    assert lane.bumpgate("rebaseline", "--lane", "cpu", "--other-tree").code == 0
    assert read_record(lane.root / "record.json").provenance["tree"]


def test_rebaseline_takes_a_record_within_the_tree(lane: Project) -> None:
    lane.baseline(good=counted("test_good"))
    for _ in range(2):  # the record of the second run replaces a file that exists
        assert lane.pytest(*GATE[:-1], "--record=rows.json").code == 1, "a row without a reviewed value"
    accepted = lane.bumpgate("rebaseline", "--lane", "cpu", "--record", "rows.json")
    assert accepted.code == 0, accepted.err
