"""Command lines that run a lane, and the report of a run whose workers do not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.core.rows import read_record
from bumpgate.plugin import run as plugin
from bumpgate.process import host
from bumpgate.process.runner import run_lane
from tests.support.project import GOOD, Project, counted

NO_WORKER = """
import os
import pytest

def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        raise pytest.UsageError("unrecognized arguments: --colour")
"""


@pytest.fixture
def lane(project: Project) -> Project:
    """A project with one test and its reviewed row."""
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    return project


def test_whole_lane_with_record_outside_the_tree(
    lane: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = tmp_path_factory.mktemp("elsewhere") / "record.json"
    for _ in range(2):  # the second time the file exists
        result = lane.pytest("-m", "cpu", "-n", "2", f"--record={record}", "--gate")
        assert result.code == 0, result.out + result.err
    assert read_record(record).provenance["full_run"]
    record.unlink()
    assert lane.pytest("-m", "cpu", "-n", "2", "--record", str(record), "--gate").code == 0


def test_path_argument_from_another_directory(
    lane: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for workers in "02":
        record = f"record-{workers}.json"
        arguments = (str(lane.root), "-m", "cpu", "-n", workers, "--record", record, "--gate")
        result = lane.pytest(*arguments, cwd=str(elsewhere), PYTHONPATH=str(lane.root))
        assert result.code == 0, result.out + result.err
        assert read_record(elsewhere / record).provenance["full_run"]


@pytest.mark.parametrize("extra", [(), ("-p", "bumpgate.plugin")], ids=["once", "twice"])
def test_plugin_from_pythonpath_alone(lane: Project, extra: tuple[str, ...]) -> None:
    """As started by the gate for its candidate, whose interpreter may also have bumpgate installed."""
    result = lane.pytest("-m", "cpu", *extra, PYTHONPATH=str(lane.root))
    assert result.code == 0, result.out + result.err


def test_gate_child_command_runs_whole_lane(lane: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    record = tmp_path_factory.mktemp("out") / "good.json"
    run = run_lane(Path(sys.executable), lane.root, "cpu", [], record, check_import=False)
    assert (run.code, run.failure) == (0, ""), run.log.read_text()
    assert run.record
    assert [j.label for j in run.record.judgements] == ["PASS"]


def test_dead_workers_are_one_problem_and_never_a_prune(lane: Project) -> None:
    lane.write("suites/conftest.py", NO_WORKER)
    lane.baseline(good=counted("test_good"), other=counted("test_other"))
    result = lane.pytest("-m", "cpu", "-n", "1", "--max-worker-restart=1", "--gate")
    assert result.code not in (0, 4)
    record = lane.record()
    assert not record.complete
    assert record.judgements == ()
    (problem,) = record.problems
    assert str(problem).startswith("all 2 rows missing: ")
    assert str(problem).endswith("UsageError: unrecognized arguments: --colour")
    assert "--prune" not in result.out


def test_gate_child_reports_dead_workers_as_failure(lane: Project) -> None:
    lane.write("suites/conftest.py", NO_WORKER)
    arguments = ["-n", "1", "--max-worker-restart=1"]
    record = lane.root / "good.json"
    run = run_lane(Path(sys.executable), lane.root, "cpu", arguments, record, check_import=False)
    assert run.record is None, "an empty record would report every row as missing"
    assert "all 1 rows missing" in run.failure
    assert "unrecognized arguments: --colour" in run.failure


def test_exceeded_restarts_after_some_rows_name_their_cause(lane: Project) -> None:
    body = '@lanes("cpu")\ndef test_crash(lane, row):\n    os._exit(3)\n'
    lane.tests(GOOD + body + body.replace("test_crash", "test_next"))
    lane.baseline(good=counted("test_good"), next=counted("test_next"))
    lane.pytest("-m", "cpu", "-n", "1", "--max-worker-restart=0")
    assert not lane.record().complete
    assert "workers died: Not properly terminated" in lane.reason("next")
    assert all("--prune" not in j.command for j in lane.record().judgements)


def test_existing_record_after_a_space_is_explained(
    lane: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pytest parses it as a test path, so the plugin is only loaded if bumpgate is installed."""
    record = tmp_path_factory.mktemp("elsewhere") / "record.json"
    record.write_text("{}")
    result = lane.pytest(
        "-p", "bumpgate.plugin", "-m", "cpu", "--record", str(record), PYTHONPATH=str(lane.root)
    )
    assert result.code == 4
    assert f"write --record={record}" in result.err
    assert record.read_text() == "{}"


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
    ("lanes", "workers"), [("h200", 14), ("v6e", 1), ("cpu or v6e", 1), ("not cpu", None), ("", None)]
)
def test_auto_workers_of_a_lane_depend_on_its_device(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, lanes: str, workers: int | None
) -> None:
    monkeypatch.setattr(plugin, "cores", lambda: 14 + plugin.SPARE_CORES)
    monkeypatch.setattr(plugin, "MOST_GPU_WORKERS", 16)
    monkeypatch.setattr(pytestconfig.option, "markexpr", lanes)
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


@pytest.mark.parametrize(("visible", "workers"), [("", 6), ("3", 6), ("0,1", 12), ("0,1,2,3", 20)])
def test_each_visible_gpu_gets_as_many_workers(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, visible: str, workers: int
) -> None:
    monkeypatch.setattr(plugin, "cores", lambda: 20 + plugin.SPARE_CORES)
    monkeypatch.setattr(plugin, "MOST_GPU_WORKERS", 6)
    monkeypatch.setattr(pytestconfig.option, "markexpr", "h200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


def test_available_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    assert host.available_gib(tmp_path, tmp_path) == 8
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_gib(tmp_path, tmp_path) == 8
    (tmp_path / "memory.max").write_text(f"{2**31}\n")
    assert host.available_gib(tmp_path, tmp_path) == 2


def test_plugin_imports_neither_torch_nor_suites() -> None:
    program = (
        "import sys, bumpgate.plugin; print(sorted({'torch', 'suites', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
