"""Lane runs in another interpreter: their results, and that no process is left, whichever dies first."""

from __future__ import annotations

import signal
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bumpgate.process import child
from bumpgate.process.host import read_or_empty
from bumpgate.process.runner import (
    NOTHING_SELECTED,
    USAGE,
    LaneCall,
    LaneRun,
    child_environment,
    installed,
    run_lane,
)
from tests.support.project import GOOD, PLUGINS, Project, counted, wait_for

PYTHON = Path(sys.executable)
QUICK = PLUGINS | {"PYTHONDONTWRITEBYTECODE": "1"}
SLEEPER = """
import subprocess, sys
@lanes("cpu")
def test_sleeps(lane):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open("there", "w") as f:
        f.write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
"""


def run(project: Project, *selection: str, gate: bool = True, **options: Any) -> LaneRun:
    place = PYTHON, project.root, "cpu", ("-n", "0", *selection), project.root / "r.json"
    return run_lane(LaneCall(*place, gate, QUICK), **options)


def test_run_lane_returns_the_record_of_a_complete_run(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    (project.root / "r.json").write_text("an older run")
    found = run(project)
    assert (found.code, found.failure) == (0, "")
    assert found.record
    assert found.record.complete
    assert [j.row.id for j in found.record.judgements] == ["compile/good/graph_breaks"]
    assert found.log.read_text().count("1 passed") == 1
    assert 0 < found.seconds < 60


def test_child_bytecode_is_cached_inside_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """uv installs no bytecode; a user's own interpreter keeps the user's settings."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = tmp_path / "environments/key"
    venv.create(environment)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "imported.py").write_text("")
    python = environment / "bin/python"
    command = [python, "-c", "import imported"]
    subprocess.run(command, env=child_environment(python, tree), cwd=tree, check=True)
    assert [path.name for path in tree.iterdir()] == ["imported.py"]
    assert len([*(environment / "bytecode").rglob("imported.*.pyc")]) == 1
    own = child_environment(PYTHON, tree)
    assert (own["PYTHONDONTWRITEBYTECODE"], "PYTHONPYCACHEPREFIX" in own) == ("1", False)


def test_child_env_vars_include_the_gate_but_not_user_settings(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--frob")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("BUMPGATE_GATE", "1")
    body = """
    @lanes("cpu")
    def test_sees(lane):
        print("seen", os.environ.get("BUMPGATE_GATE"), os.environ["PYTHONPATH"], os.environ["PATH"].split(":")[0])
    """
    project.tests(body)
    place = f"{project.root} {PYTHON.parent}"
    assert f"seen 1 {place}" in run(project, "-s").log.read_text()
    assert f"seen None {place}" in run(project, "-s", gate=False).log.read_text()


def test_run_lane_reports_pytests_usage_error(project: Project) -> None:
    project.tests(GOOD)
    refused = run(project, "suites/nope")
    assert (refused.code, refused.record) == (USAGE, None)
    assert refused.failure == "file or directory not found: suites/nope"
    empty = run(project, "-k", "nothing")
    assert (empty.code, empty.failure) == (NOTHING_SELECTED, "")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_run_lane_reports_a_test_whose_file_does_not_import(project: Project, workers: str) -> None:
    """To pytest the id of such a test is a usage error."""
    project.tests("from torch._private import gone\n" + GOOD)
    project.write("torch/__init__.py", "")
    found = run(project, "suites/compile/test_a.py::test_sleeps[cpu]", "-n", workers)
    assert (found.code, found.record) == ({"0": 2, "2": 1}[workers], None)
    assert found.failure.startswith("suites/compile/test_a.py: could not be collected: ")
    assert "torch._private" in found.failure


DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
TORCHES = {
    "raise ImportError('libcudart.so.13: no such file')": "exit 1: ImportError: libcudart.so.13: no such file",
    DIES: "killed by SIGSEGV: Fatal Python error: Segmentation fault",
    "import no_such_module": "exit 1: ModuleNotFoundError: No module named 'no_such_module'",
}


@pytest.mark.parametrize(("torch", "why"), TORCHES.items(), ids=["raises", "segfaults", "incomplete"])
def test_run_lane_reports_a_broken_torch_in_one_line(project: Project, torch: str, why: str) -> None:
    project.tests(GOOD)
    project.write("torch/__init__.py", torch)
    found = run(project)
    assert (found.record, found.failure) == (None, f"import torch: {why}")


def test_run_lane_reports_a_missing_interpreter(project: Project) -> None:
    found = run_lane(LaneCall(Path("/no/python"), project.root, "cpu", (), project.root / "r.json"))
    assert (found.record, found.failure) == (None, "import torch: /no/python: No such file or directory")


def test_run_that_dies_before_its_record_has_none(project: Project) -> None:
    """An earlier record at the same place is not that of this run."""
    project.tests(GOOD)
    assert run(project).record
    project.write("suites/conftest.py", "import os\nos._exit(9)\n")
    found = run(project)
    assert found.record is None
    assert found.failure


def test_installed_returns_packages_and_torch_commit(project: Project) -> None:
    project.write("torch/__init__.py", "from torch import version\n__version__ = version.__version__\n")
    found = installed(PYTHON, project.root, "cpu")
    assert (found.failure, found.git_version) == ("", {"torch": "f00d"})
    assert "pytest" in found.packages


def test_run_lane_keeps_the_partial_record_of_a_crash(project: Project) -> None:
    project.tests("@lanes('cpu')\ndef test_dies(lane):\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    project.baseline(dies=counted("test_dies"))
    found = run(project)
    assert (found.code, found.failure) == (-signal.SIGSEGV, "died of SIGSEGV")
    assert found.record
    assert not found.record.complete


def test_run_lane_timeout_keeps_record_and_leaves_no_process(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over as soon as the second test sleeps."""
    there = project.root / "there"
    over = SimpleNamespace(monotonic=lambda: 2.0 * (len(read_or_empty(there).split()) == 2))
    monkeypatch.setattr(child, "time", over)
    project.tests(GOOD + SLEEPER)
    project.baseline(good=counted("test_good"), sleeps=counted("test_sleeps"))
    found = run(project, timeout=1.0, check_import=False)
    assert found.failure == "no end within 1 s"
    assert found.record
    verdicts = {j.row.id.split("/")[1]: j.verdict.value for j in found.record.judgements}
    assert verdicts == {"good": "PASS", "sleeps": "MISSING"}
    assert not alive((project.root / "there").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_killed_parent_ends_the_lane_run(project: Project, number: signal.Signals) -> None:
    project.tests(GOOD + SLEEPER)
    program = (
        "import sys; from pathlib import Path; from bumpgate.process.runner import LaneCall, run_lane\n"
        "call = LaneCall(Path(sys.executable), Path.cwd(), 'cpu', ['-n', '0'], Path('r.json'), "
        f"environment={QUICK!r})\nrun_lane(call)"
    )
    starter = project.start("-c", program)
    wait_for(lambda: len(read_or_empty(project.root / "there").split()) == 2)
    started = (project.root / "there").read_text()
    assert alive(started), "the test and its child process"
    starter.send_signal(number)
    starter.communicate(timeout=60)
    wait_for(lambda: not alive(started))


def alive(pids: str) -> bool:
    """Whether any of the processes still runs; a zombie does not count."""
    found = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    return any(process.status() != psutil.STATUS_ZOMBIE for process in found)


def test_interpreter_in_the_root_folder_has_an_environment(tmp_path: Path) -> None:
    assert "PYTHONPYCACHEPREFIX" not in child_environment(Path("/python"), tmp_path)
