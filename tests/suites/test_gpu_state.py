"""A time measured on a hot, throttled or shared GPU is invalid: its row is INFRA.

The readings are simulated: no GPU is needed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.plugin.rows import InfraError
from suites.support import gpu_state
from suites.support.gpu_state import UNEXPLAINED_BYTES, State, alone_on_gpu, read, spoiled, state_line
from suites.support.planted import planted
from tests.support.project import REPO, Project

POWER_CAP, HARDWARE_SLOWDOWN, SOFTWARE_THERMAL, HARDWARE_THERMAL, BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
QUIET = State("GPU-1", 1980, 3201, 690, 61, POWER_CAP, 12.0, (), 1 << 29)
HIDDEN = replace(QUIET, strangers=None)
MUCH = UNEXPLAINED_BYTES + (1 << 30)
NO_PROCESS = 2**22 + 1  # above the kernel's largest pid

# A fake nvidia-ml-py. From a list it returns one entry per call, then repeats the last one.
NVML = """
from types import SimpleNamespace

class NVMLError(Exception):
    pass

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_TEMPERATURE_GPU, NVML_PERF_POLICY_THERMAL = 0, 1
REASONS, PIDS, USED, HOT = [0x4], [[]], [1 << 29], [0]

next_of = lambda values: values.pop(0) if len(values) > 1 else values[0]
nvmlInit = lambda: None
nvmlDeviceGetHandleByIndex = 'GPU-{}'.format
nvmlDeviceGetHandleByUUID = nvmlDeviceGetUUID = lambda uuid: uuid
nvmlDeviceGetClockInfo = lambda handle, clock: {1: 1980, 2: 3201}[clock]
nvmlDeviceGetPowerUsage = lambda handle: 690_000
nvmlDeviceGetTemperature = lambda handle, sensor: 61
nvmlDeviceGetCurrentClocksEventReasons = lambda handle: next_of(REASONS)
nvmlDeviceGetViolationStatus = lambda handle, policy: SimpleNamespace(violationTime=next_of(HOT))
nvmlDeviceGetComputeRunningProcesses = lambda handle: [SimpleNamespace(pid=pid) for pid in next_of(PIDS)]
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=next_of(USED))
"""


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (QUIET, QUIET, ""),
        (QUIET, replace(QUIET, sm=1500, watts=700, celsius=80), ""),
        (QUIET, replace(QUIET, hot_seconds=12.05), ""),
        (QUIET, replace(QUIET, hot_seconds=None), ""),
        (QUIET, replace(QUIET, unexplained=MUCH), ""),
        (HIDDEN, replace(HIDDEN, unexplained=UNEXPLAINED_BYTES), ""),
        (replace(QUIET, strangers=(7,)), QUIET, "foreign processes on it: 7"),
        (QUIET, replace(QUIET, strangers=(7, 9)), "foreign processes on it: 7, 9"),
        (replace(QUIET, reasons=SOFTWARE_THERMAL), QUIET, "software thermal slowdown before it"),
        (QUIET, replace(QUIET, reasons=POWER_CAP | HARDWARE_THERMAL), "hardware thermal slowdown after it"),
        (QUIET, replace(QUIET, reasons=BRAKE), "hardware power brake after it"),
        (QUIET, replace(QUIET, hot_seconds=13.0), "heat held the clocks down for 1.00 of 10.00 s"),
        (QUIET, replace(QUIET, uuid="GPU-2"), "GPU-1 before it and GPU-2 after it"),
        (HIDDEN, replace(HIDDEN, unexplained=MUCH), "3.0 GiB of its memory are not of this process"),
        (replace(HIDDEN, unexplained=MUCH), QUIET, "3.0 GiB of its memory are not of this process"),
    ],
)  # fmt: skip
def test_spoiled_reports_why_a_time_is_invalid(before: State, after: State, cause: str) -> None:
    found = spoiled(before, after, 10.0)
    assert len(found) == bool(cause), found
    assert all(cause in line for line in found), found


def test_memory_of_other_workers_may_not_grow() -> None:
    held = replace(HIDDEN, unexplained=MUCH)
    assert spoiled(held, held, 10.0)
    assert not spoiled(held, held, 10.0, only_worker=False)
    assert spoiled(held, replace(HIDDEN, unexplained=2 * MUCH), 10.0, only_worker=False)


def test_both_readings_are_on_one_line() -> None:
    line = state_line(QUIET, replace(QUIET, sm=1755, watts=698, reasons=0))
    assert line == (
        "GPU-1 by NVML, before and after: SM 1980, 1755 MHz; memory 3201, 3201 MHz; 690, 698 W; 61, 61 C; "
        "clocks held by software power cap, nothing"
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ModuleType]:
    """Install the fake, with other readings by name; locks are in a private folder."""
    monkeypatch.setattr(gpu_state, "LOCKS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_state, "_cuda", lambda: None)

    def install(**changes: Any) -> ModuleType:
        module = ModuleType("pynvml")
        exec(NVML, vars(module))
        vars(module).update(changes)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


class Cuda:
    """Fake torch.cuda of a process that uses the GPU."""

    @staticmethod
    def memory_reserved(device: int) -> int:
        return 5 << 30


def test_read_state_with_nvml(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(HOT=[2_500_000_000])
    assert read() == State("GPU-0", 1980, 3201, 690.0, 61, POWER_CAP, 2.5, (), 1 << 29)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,1")
    assert read().uuid == "GPU-abc"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert read().uuid == "GPU-3"


def test_read_state_without_some_nvml_queries(nvml) -> None:
    module = nvml()

    def refuse(*arguments: object) -> None:
        raise module.NVMLError("Not Supported")

    module.nvmlDeviceGetViolationStatus = refuse
    assert read().hot_seconds is None
    module.nvmlDeviceGetCurrentClocksEventReasons = refuse
    with pytest.raises(InfraError, match="the state of GPU 0 is unknown: NVML: Not Supported"):
        read()
    del module.nvmlDeviceGetCurrentClocksEventReasons
    with pytest.raises(InfraError, match="nvmlDeviceGetCurrentClocksEventReasons"):
        read()


def test_transient_slowdown_is_read_again(nvml) -> None:
    nvml(REASONS=[HARDWARE_SLOWDOWN, POWER_CAP])
    assert read().reasons == POWER_CAP
    nvml(REASONS=[HARDWARE_SLOWDOWN])
    assert read().reasons == HARDWARE_SLOWDOWN
    nvml(REASONS=[HARDWARE_SLOWDOWN | HARDWARE_THERMAL, POWER_CAP])
    assert read().reasons == HARDWARE_SLOWDOWN | HARDWARE_THERMAL


def test_foreign_processes_exclude_this_session(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ours, other = [os.getpid(), child.pid], os.getppid()
        nvml(PIDS=[ours])
        assert read().strangers == ()
        nvml(PIDS=[[*ours, other]])
        assert read().strangers == (other,)
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
        assert read().strangers == (), "the controller and all of its workers are one session"
    finally:
        child.communicate(b"\n")


def test_process_ids_of_another_namespace_are_unknown(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(PIDS=[[NO_PROCESS]])
    assert read().strangers is None
    nvml(PIDS=[[]])
    monkeypatch.setattr(gpu_state, "_cuda", lambda: Cuda)
    assert read().strangers is None, "this process uses the GPU and is not listed"
    nvml(PIDS=[[os.getpid()]], USED=[6 << 30])
    assert read().strangers == ()
    assert read().unexplained == 1 << 30


def test_error_without_nvml_has_the_fix(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with alone_on_gpu() as state, pytest.raises(InfraError, match="pip install nvidia-ml-py"):
        state()


def test_gpu_is_locked_by_its_uuid(nvml, tmp_path: Path) -> None:
    nvml()
    with alone_on_gpu() as state, open(tmp_path / "bumpgate-GPU-0.lock") as other:
        assert "GPU-0 by NVML" in state()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with open(tmp_path / "bumpgate-GPU-0.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


BODY = """
@lanes("LANE")
def test_time(lane, row, exclusive_machine):
    row.count("compile/exact/graph_breaks", 13, expected=13, **COUNT)
    row.timed("compile/timed/seconds", at(1.0, 0.9, 1.1), **TIMED)
"""

# The locks of the fake GPU are kept apart from those of real ones.
LOCKS_HERE = """
from pathlib import Path
from suites.support import gpu_state

gpu_state.LOCKS = Path.cwd()

def pytest_bumpgate_calibrations(lane):  # the fake torch has no device to measure
    return {}
"""


CUDA = """
class cuda:
    get_device_name = lambda index: "NVIDIA H200"
    get_device_capability = lambda index: (9, 0)
"""


def lane_project(project: Project, lane: str) -> None:
    """The fixtures of suites/conftest.py, a fake torch that sees an H200, and two reviewed rows."""
    project.write("suites/conftest.py", (REPO / "suites/conftest.py").read_text())
    project.write("torch/__init__.py", CUDA)
    project.tests(BODY.replace("LANE", lane))
    test = f"suites/compile/test_a.py::test_time[{lane}]"
    rows = {
        "compile/exact/graph_breaks": Reviewed(13, "breaks", "derived", test=test),
        "compile/timed/seconds": Reviewed(1.0, "s", "lower", 0.1, test=test),
    }
    save(project.root / f"baselines/{lane}.json", Baseline(lane, {"torch": "9.9.0"}, rows))


# A session reads the state for the lock, then before the test, then at each timed row.
@pytest.mark.parametrize(
    ("readings", "verdict", "words"),
    [
        pytest.param("", "PASS", "", id="ordinary"),
        pytest.param(
            "PIDS = [[1]]", "INFRA", "foreign processes on it: 1",
            marks=planted("C37", "a foreign process on the GPU"), id="foreign"),
        pytest.param(
            "PIDS = [[], [], [1]]", "INFRA", "foreign processes on it: 1",
            marks=planted("C37", "a foreign process that comes while a test is timed"), id="foreign_in_between"),
        pytest.param(
            "REASONS = [4, 4, 0x44]", "INFRA", "hardware thermal slowdown after it",
            marks=planted("C37", "a GPU that throttles for heat"), id="thermal"),
        pytest.param(
            "HOT = [0, 0, 10**12]", "INFRA", "heat held the clocks down",
            marks=planted("C37", "heat that has passed when the test ends"), id="heat_in_between"),
        pytest.param(
            "raise ImportError('none here')", "INFRA", "pip install nvidia-ml-py",
            marks=planted("C37", "a GPU whose state cannot be read"), id="no_library"),
    ],
)  # fmt: skip
def test_only_timed_row_is_infra_in_a_bad_gpu_state(
    project: Project, readings: str, verdict: str, words: str
) -> None:
    lane_project(project, "h200")
    project.write("pynvml.py", NVML + readings + "\n")
    with (project.root / "suites/conftest.py").open("a") as conftest:
        conftest.write(LOCKS_HERE)
    place = str(project.root)
    result = project.pytest("-m", "h200", "-n", "0", PATH=place, TMPDIR=place, CUDA_VISIBLE_DEVICES="0")
    assert project.verdicts() == {"exact": "PASS", "timed": verdict}, result.out
    assert result.code == (0 if verdict == "PASS" else 1)
    assert words in project.reason("timed")
    evidence = {j.row.id.split("/")[1]: j.row.evidence for j in project.record().judgements}
    assert evidence["exact"] == ()
    if verdict == "PASS":
        assert "GPU-0 by NVML, before and after: SM 1980, 1980 MHz" in evidence["timed"][0]


def test_cpu_lane_reads_no_gpu_and_imports_no_torch(project: Project) -> None:
    lane_project(project, "cpu")
    project.write("torch/__init__.py", "open('torch-was-imported', 'w')\n")
    body = (
        BODY.replace("LANE", "cpu")
        + "    import sys\n    assert 'suites.support.gpu_state' not in sys.modules\n"
    )
    project.tests(body)
    result = project.pytest("-m", "cpu", "-n", "0", TMPDIR=str(project.root))
    assert project.verdicts() == {"exact": "PASS", "timed": "PASS"}, result.out
    assert result.code == 0, result.out
    assert not (project.root / "torch-was-imported").exists()
