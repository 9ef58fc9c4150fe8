"""Attempts to make a lane look green without measuring it, each with the real command: none exits 0.

tests/attacks tries many more, on a wrong row and on a failing test.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest

from bumpgate.core.rows import read_record
from bumpgate.plugin import run as plugin
from bumpgate.process import host
from bumpgate.process.runner import LaneCall, child_environment, run_lane
from tests.support.project import GOOD, Project, counted, wait_for

GATE = ("-m", "cpu", "-n", "0", "--gate")
SLOW = """
@pytest.mark.cold
@lanes("cpu")
def test_cold(lane):
    pass

@pytest.mark.fresh_process
@pytest.mark.usefixtures("exclusive_machine")
@lanes("cpu")
def test_alone(lane):
    pass
"""
NARROW = [
    "--ignore=suites/model",
    "--ignore-glob=*/model/*",
    "--deselect=suites/model",
    "-k good",
    "suites/compile",
    "suites/compile/test_a.py::test_good",
    "-o norecursedirs=model",
    "-o testpaths=suites/compile",
    "-o python_files=test_a.py",
    "-m 'cpu and not long and not fresh_process'",
    "--fast",
    "-n 2 --fast",
]


@pytest.fixture
def slow_lane(lane: Project) -> Project:
    """The lane, whose tests in suites/model are slow: --fast leaves them out."""
    long = GOOD.replace("good", "other").replace("@lanes", "@pytest.mark.long(9)\n@lanes")
    lane.tests(long + SLOW, "suites/model/test_b.py")
    return lane


def test_complete_lane_is_green_under_gate(lane: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also with a record elsewhere, which exists the second time, and with paths that select every test."""
    lane.tests("def test_of_no_lane():\n    pass\n", "suites/others/test_c.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    record = elsewhere / "record.json"
    at_root = {"cwd": str(elsewhere), "PYTHONPATH": str(lane.root)}
    for arguments, where in (
        (("-n", "2", f"--record={record}"), {}),
        (("-n", "0", f"--record={record}", "suites/compile", "suites/model"), {}),
        (("-n", "0", "--record", "record.json", str(lane.root)), at_root),
        (("-n", "2", "--record", "record.json", str(lane.root)), at_root),
    ):
        result = lane.pytest("-m", "cpu", "--gate", *arguments, **where)
        assert result.code == 0, result.out + result.err
        assert "part of the lane" not in result.out
        assert read_record(record).provenance["full_run"] is ("suites/model" not in arguments)


@pytest.mark.parametrize("narrow", NARROW)
def test_part_of_the_lane_is_green_only_if_declared(slow_lane: Project, narrow: str) -> None:
    undeclared = slow_lane.pytest(*GATE, *shlex.split(narrow))
    assert undeclared.code == 1, undeclared.out + undeclared.err
    assert "part of the lane: 1 of 2 rows; add --part" in undeclared.out
    declared = slow_lane.pytest(*GATE, "--part", *shlex.split(narrow))
    assert declared.code == 0, declared.out + declared.err
    assert "cpu: 1 row: 1 PASS; part of the lane: 1 of 2 rows; device cpu" in declared.out
    provenance = slow_lane.record().provenance
    assert (provenance["part"], provenance["full_run"]) == ([1, 2], False)


def test_run_of_the_last_failures_is_a_part(lane: Project) -> None:
    lane.baseline(good=counted("test_good"))
    with_cache = ("-m", "cpu", "-o", "addopts=-p bumpgate.plugin")
    assert lane.pytest(*with_cache).code == 1, "other is not reviewed"
    assert lane.bumpgate("rebaseline", "--lane", "cpu").code == 0
    result = lane.pytest(*with_cache, "--lf")
    assert result.code == 0, result.out
    assert "part of the lane: 1 of 2 rows" in result.out
    assert "needs the record of a whole run" in lane.bumpgate("rebaseline", "--lane", "cpu", "--prune").err


@pytest.mark.parametrize("narrow", ["--deselect=suites/model", "-k good", "suites/compile"])
def test_part_without_tests_that_have_no_row_is_red(lane: Project, narrow: str) -> None:
    """A left-out test without a reviewed row: its assertions count, too."""
    lane.tests("@lanes('cpu')\ndef test_law(lane):\n    assert False\n", "suites/model/test_b.py")
    lane.baseline(good=counted("test_good"))
    result = lane.pytest(*GATE, *narrow.split())
    assert result.code == 1, result.out + result.err
    assert "part of the lane: all 1 reviewed rows, but not all tests; add --part" in result.out
    assert lane.pytest(*GATE, *narrow.split(), "--part").code == 0


def test_fast_without_a_lane_is_refused_in_one_line(lane: Project) -> None:
    done = lane.pytest("-n", "0", "--fast")
    assert done.code == 4, done.out + done.err
    assert "ERROR: --fast is a part of a lane: add -m cpu | h100 | h100x4" in done.err
    assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize("workers", ["0", "1"])
def test_empty_selection_is_not_green(lane: Project, workers: str) -> None:
    result = lane.pytest("-m", "cpu", "-k", "nothing", "-n", workers)
    assert result.code == 5
    assert result.out.count("nothing was selected: not green") == 1


def test_child_of_a_gate_declares_a_selection_only(lane: Project) -> None:
    for arguments, part in ((["suites/compile"], [1, 2]), ([], None)):
        record = lane.root / f"{len(arguments)}.json"
        call = LaneCall(Path(sys.executable), lane.root, "cpu", arguments, record)
        run = run_lane(call, check_import=False)
        assert (run.code, run.failure) == (0, ""), run.log.read_text()
        assert run.record
        assert not run.record.red
        assert run.record.provenance.get("part") == part


NO_WORKER = """
import os
import pytest

def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        raise pytest.UsageError("unrecognized arguments: --colour")
"""


def test_dead_workers_are_one_problem_and_never_a_prune(lane: Project) -> None:
    """A gate reports it as the failure of its side: an empty record would report every row as missing."""
    lane.write("suites/conftest.py", NO_WORKER)
    one = ("-n", "1", "--max-worker-restart=1")
    result = lane.pytest("-m", "cpu", *one, "--gate")
    assert result.code not in (0, 4)
    record = lane.record()
    assert (record.complete, record.judgements) == (False, ())
    (problem,) = record.problems
    assert str(problem).startswith("all 2 rows missing: ")
    assert str(problem).endswith("UsageError: unrecognized arguments: --colour")
    assert "--prune" not in result.out
    call = LaneCall(Path(sys.executable), lane.root, "cpu", list(one), lane.root / "side.json")
    run = run_lane(call, check_import=False)
    assert run.record is None
    assert "all 2 rows missing" in run.failure
    assert "unrecognized arguments: --colour" in run.failure


def test_exceeded_restarts_after_some_rows_name_their_cause(lane: Project) -> None:
    body = '@lanes("cpu")\ndef test_crash(lane, row):\n    os._exit(3)\n'
    lane.tests(GOOD + body + body.replace("test_crash", "test_next"))
    lane.baseline(good=counted("test_good"), next=counted("test_next"))
    lane.pytest("-m", "cpu", "-n", "1", "--max-worker-restart=0")
    assert not lane.record().complete
    assert "workers died: Not properly terminated" in lane.reason("next")
    assert all("--prune" not in j.command for j in lane.record().judgements)


@pytest.mark.parametrize(
    ("lost", "variable"),
    [
        ("bumpgate-session", False),
        ("bumpgate-selection", True),
        ("bumpgate-rows", True),
        ("bumpgate.plugin", False),
        ("bumpgate.plugin", True),
    ],
)
def test_blocked_plugin_is_refused(lane: Project, lost: str, variable: bool) -> None:
    """Without --gate, too."""
    option = f"-p no:{lost}"
    result = lane.pytest(*GATE[:-1], *(() if variable else option.split()), PYTEST_ADDOPTS=option * variable)
    assert result.code == 4, result.out + result.err
    record = lane.root / "record.json"
    assert not record.exists() or not lane.record().complete


@pytest.mark.parametrize("instead", ["--fixtures", "--markers", "--help", "--version --version"])
def test_gate_that_judges_nothing_exits_with_4(lane: Project, instead: str) -> None:
    result = lane.pytest(*GATE, PYTEST_ADDOPTS=instead)
    assert (result.code, "ERROR: " in result.err) == (4, True), result.out + result.err


FORKS = """
@lanes("cpu")
def test_good(lane, row):
    pid = os.fork()
    if pid == 0:
        {child}
    os.waitpid(pid, 0)
    row.count("compile/good/graph_breaks", {value}, expected=13, **COUNT)
"""


def test_child_of_a_test_is_not_the_run(lane: Project) -> None:
    """It may exit; one that returns into the test continues the run, and its rows are not the run's."""
    lane.tests(FORKS.format(child="os._exit(0)", value=13))
    assert lane.pytest(*GATE).code == 0
    lane.tests(FORKS.format(child="return", value=14))
    result = lane.pytest(*GATE)
    assert (result.code, result.out.count("record: ")) == (1, 1)
    assert lane.verdicts()["good"] == "REGRESSION"


@pytest.mark.parametrize("broken", ["import nothing_of_this_name", "import os; os.kill(os.getpid(), 9)"])
def test_run_that_ends_early_leaves_no_older_record(lane: Project, broken: str) -> None:
    assert lane.pytest(*GATE).code == 0
    lane.write("suites/conftest.py", broken)
    assert lane.pytest(*GATE[:-1]).code in (4, -9)
    assert not lane.record().complete


def test_signal_to_the_parent_alone_ends_the_run(lane: Project) -> None:
    lane.tests(GOOD + "    open('began', 'w').close()\n    time.sleep(100)\n")
    process = lane.start("-m", "pytest", *GATE)
    wait_for((lane.root / "began").exists, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert not lane.record().complete


def test_existing_record_after_a_space_is_explained(
    lane: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pytest parses it as a test path, so the plugin is only loaded if bumpgate is installed."""
    record = tmp_path_factory.mktemp("elsewhere") / "record.json"
    record.write_text("{}")
    arguments = ("-p", "bumpgate.plugin", "-m", "cpu", "--record", str(record))
    result = lane.pytest(*arguments, PYTHONPATH=str(lane.root))
    assert (result.code, record.read_text()) == (4, "{}")
    assert f"write --record={record}" in result.err


def test_plugin_is_registered_once(lane: Project) -> None:
    """As started by the gate for its candidate, whose interpreter may also have bumpgate installed."""
    result = lane.pytest("-m", "cpu", "-p", "bumpgate.plugin", PYTHONPATH=str(lane.root))
    assert result.code == 0, result.out + result.err


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


def test_optimised_python_is_refused(lane: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = ("-c", "from bumpgate.cli import main; main()", "gate", "--lane", "cpu")
    for arguments in (("-m", "pytest", *GATE[:-1]), command):
        process = lane.start("-O", *arguments)
        _, err = process.communicate(timeout=120)
        assert (process.returncode, len(err.strip().splitlines())) == (4, 1)
        assert "PYTHONOPTIMIZE or -O removes" in err
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert "PYTHONOPTIMIZE" not in child_environment(Path(sys.executable), tmp_path)


def test_rebaseline_refuses_a_record_of_other_sources(lane: Project) -> None:
    lane.baseline(good=counted("test_good"))
    assert lane.pytest("-m", "cpu", "-n", "0").code == 1, "a row without a reviewed value"
    lane.write("suites/compile/helper.py", "X = 1\n")
    refused = lane.bumpgate("rebaseline", "--lane", "cpu")
    assert (refused.code, len(refused.err.splitlines())) == (1, 1)
    assert "measured from other sources" in refused.err
    (lane.root / "suites/compile/helper.py").unlink()
    lane.write("README.md", "a document is not measured\n")
    assert lane.bumpgate("rebaseline", "--lane", "cpu", "--dry-run").code == 0
    lane.write("suites/compile/helper.py", "X = 2\n")
    assert lane.bumpgate("rebaseline", "--lane", "cpu", "--other-tree").code == 0


@pytest.mark.parametrize(
    ("cores", "gib", "workers"), [(2, 20.0, 2), (64, 33.0, 8), (4, 3.0, 1), (None, 0.0, 1)], ids=str
)
def test_auto_workers_are_bounded_by_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, cores: int | None, gib: float, workers: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(host, "available_gib", lambda: gib)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(pytestconfig.option, "markexpr", "cpu")
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


@pytest.mark.parametrize(
    ("lanes", "visible", "workers"),
    [
        ("h200", "", 6),
        ("h200", "3", 6),
        ("h200", "0,1", 12),
        ("h200", "0,1,2,3", 20),
        ("v6e", "", 1),
        ("cpu or v6e", "", 1),
        ("not cpu", "", None),
        ("", "", None),
    ],
)
def test_auto_workers_of_a_lane_depend_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    lanes: str,
    visible: str,
    workers: int | None,
) -> None:
    monkeypatch.setattr(plugin, "cores", lambda: 20 + plugin.SPARE_CORES)
    monkeypatch.setattr(plugin, "MOST_GPU_WORKERS", 6)
    monkeypatch.setattr(pytestconfig.option, "markexpr", lanes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


def test_available_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    assert host.available_gib(tmp_path, tmp_path) == 8
    for limit, gib in (("max", 8), (f"{2**31}", 2)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert host.available_gib(tmp_path, tmp_path) == gib
