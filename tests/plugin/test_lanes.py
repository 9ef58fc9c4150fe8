"""Lanes: which tests run where, and that every refusal prints one line and exits 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.plugin.devices import _no_avx2, detect, find
from bumpgate.process.host import PARENT
from suites.support.child import ROOT
from suites.support.lanes import LANES, lanes
from tests.support.project import GOOD, Project, Result, counted

GPU = "class cuda:\n    get_device_name, get_device_capability = lambda _: 'NVIDIA {}', lambda _: (9, 0)\n"


def test_lane_tests_require_a_lane_and_self_tests_do_not(project: Project) -> None:
    project.tests(GOOD)
    project.write("tests/test_plain.py", "def test_plain(): pass\n")
    for workers in "01":
        bare = project.pytest("-n", workers)
        assert bare.code == 4
        assert (bare.out + bare.err).count("pick a lane: pytest -m cpu | h100 | h100x4") == 1
        assert "no tests ran" in bare.out
        assert "Traceback" not in bare.out + bare.err
    other = project.pytest("-n", "0", "-m", "not h200")
    assert (other.code, "pick a lane" in other.err) == (4, True)
    own = project.pytest("tests")
    assert own.code == 0, own.out
    assert "1 passed" in own.out
    assert not (project.root / "record.json").exists()


def test_compile_caches_are_checked_where_the_lane_puts_them(tmp_path: Path) -> None:
    """The check creates a missing directory, so that a program of the first test finds it."""
    given = {n: v for n, v in os.environ.items() if not n.endswith("_CACHE_DIR")}
    command = [sys.executable, "-m", "pytest", "-m", "cpu", "-n", "0", "--collect-only"]
    subprocess.run(
        [*command, "suites/wheels/test_manifest.py"],
        cwd=ROOT,
        env={**given, "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "bumpgate" / "inductor").is_dir()


def refuses(result: Result, *words: str) -> None:
    """Assert exit 4 and exactly one line, which contains the words."""
    assert (result.code, result.out) == (4, ""), result.out + result.err
    assert len(result.err.strip().splitlines()) == 1, result.err
    for word in words:
        assert word in result.err


def test_refused_runs_print_one_line_and_exit_4(project: Project) -> None:
    project.tests(GOOD)
    refuses(project.pytest("-m", "cuda"), "no marker 'cuda'", "cpu, h100, h100x4")
    refuses(project.pytest("-m", "cpu or h200"), "one lane a run")
    refuses(project.pytest("-m", "cpu", CXX="/no/such/g++"), "install g++ or set CXX")
    refuses(project.pytest("-m", "cpu", "--record", "/no/such/place/record.json"), "No such file")
    project.write("a-file", "")
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        refuses(project.pytest("-m", "cpu", **{variable: "a-file"}), f"{variable}=a-file")
    project.baseline(good=counted("test_good"))
    path = project.root / "baselines/cpu.json"
    path.write_text(path.read_text().replace('"unit"', "unit", 1))
    refuses(project.pytest("-m", "cpu"), "baselines/cpu.json line 6", "git checkout baselines/cpu.json")


def test_lane_runs_only_with_its_device(project: Project) -> None:
    body = GOOD.replace('"cpu"', '"cpu", "h200", "v6e"')
    project.tests(body)
    project.write("torch_xla/__init__.py", "raise ImportError('no libtpu')")
    refuses(project.pytest("-m", "h200"), "no NVIDIA H200", "has no attribute 'cuda'")
    refuses(project.pytest("-m", "v6e"), "no torch_xla", "bumpgate lanes install v6e", "no libtpu")
    project.write("torch/__init__.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    refuses(project.pytest("-m", "h200"), "the probe ended with -11")
    project.write("torch/__init__.py", GPU.format("H100"))
    refuses(project.pytest("-m", "h200"), "the device is 'NVIDIA H100'")
    project.write("torch/__init__.py", GPU.format("H200"))
    assert project.pytest("-m", "h200", "-n", "0").code == 1
    assert project.verdicts() == {"good": "NEW"}
    assert project.record().provenance["device"] == "NVIDIA H200"
    project.write("torch_xla/__init__.py", "")
    project.write("torch_xla/runtime.py", "def device_type(): return 'CPU'\n")
    assert project.pytest("-m", "v6e", "-n", "0").code == 1
    assert project.record().provenance["device"] == "pjrt-cpu", "a CPU is not reported as a TPU"


def test_lanes_decorator_rejects_unknown_and_missing_names() -> None:
    with pytest.raises(ValueError, match="unknown lane"):
        lanes("cpu", "tpu")
    with pytest.raises(ValueError, match="unknown lane"):
        lanes()


def test_cpu_lane_requires_a_working_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for chosen, words in (("", None), (str(broken), "ended with 3"), ("/none", "not on PATH")):
        monkeypatch.setenv("CXX", chosen)
        find.cache_clear()
        reason = detect(LANES["cpu"])
        assert reason is None if words is None else words in (reason or "")
    find.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "refused"),
    [("flags\t\t: fpu avx avx2 bmi2\n", False), ("flags\t\t: fpu avx bmi2\n", True), ("", False)],
)
def test_cpu_without_avx2_is_refused_in_one_line(cpuinfo: str, refused: bool) -> None:
    reason = _no_avx2(cpuinfo)
    assert (reason is not None) is refused
    assert "\n" not in (reason or "")


ON_GPUS = """
import os, time
log = lambda text: open("log", "a").write(text + "\\n")
@lanes("h200")
@pytest.mark.parametrize("i", range(8))
def test_shared(i, worker_id, lane):
    log(f"shared {os.environ['CUDA_VISIBLE_DEVICES']} {worker_id}")
    time.sleep(0.05)
@lanes("h200")
@pytest.mark.parametrize("i", range(4))
def test_timed(i, worker_id, lane, exclusive_machine):
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    log(f"begin {gpu} {worker_id}")
    until = time.monotonic() + 30
    while len({line.split()[1] for line in open("log") if "begin" in line}) < GPUS and time.monotonic() < until:
        time.sleep(0.01)
    log(f"end {gpu} {worker_id}")
"""


@pytest.mark.parametrize(("visible", "gpus"), [("2,5", 2), ("5", 1)])
def test_workers_of_a_lane_are_spread_over_the_gpus(project: Project, visible: str, gpus: int) -> None:
    """Timed tests run one at a time on each GPU, at the same time on different ones, and after all others."""
    project.tests(ON_GPUS.replace("GPUS", str(gpus)))
    project.write("torch/__init__.py", GPU.format("H200"))
    project.pytest("-m", "h200", "-n", "4", CUDA_VISIBLE_DEVICES=visible, TMPDIR=str(project.root))
    lines = [line.split() for line in (project.root / "log").read_text().splitlines()]
    assert len(lines) == 8 + 2 * 4, lines
    assert {gpu for _, gpu, _ in lines} == {*visible.split(",")}
    of_worker = {(worker, gpu) for _, gpu, worker in lines}
    assert all(gpu == visible.split(",")[int(worker[2:]) % gpus] for worker, gpu in of_worker)
    assert [what for what, _, _ in lines[:8]] == ["shared"] * 8
    for gpu in visible.split(","):
        found = [(what, worker) for what, its, worker in lines[8:] if its == gpu]
        assert [what for what, _ in found] == ["begin", "end"] * (4 // gpus)
        assert len({worker for _, worker in found}) == 1
    if gpus == 2:
        assert [what for what, _, _ in lines[8:10]] == ["begin", "begin"]


WAITING = """
import os, sys, time
there = int(sys.argv[-1].partition("[")[2][0])
open(f"there{there}", "w")
until = time.monotonic() + 60
while not os.path.exists(f"there{1 - there}") and time.monotonic() < until:
    time.sleep(0.01)

@lanes("h200")
@pytest.mark.parametrize("i", range(2))
def test_timed(i, lane, exclusive_machine):
    open(f"begun{i}", "w")
    until = time.monotonic() + (60 if os.environ.get("BUMPGATE_UNTIMED") == "1" else 2)
    while not os.path.exists(f"begun{1 - i}") and time.monotonic() < until:
        time.sleep(0.01)
    assert os.path.exists(f"begun{1 - i}") == (os.environ.get("BUMPGATE_UNTIMED") == "1")
    time.sleep(0.5)  # the other one looks meanwhile
    os.remove(f"begun{i}")
"""


@pytest.mark.parametrize("untimed", [False, True])
def test_runs_that_fill_caches_share_a_gpu(project: Project, untimed: bool) -> None:
    """Two processes of a share with a timed test each: at once if nothing uses their times, else in turn."""
    project.tests(WAITING)
    project.write("torch/__init__.py", GPU.format("H200"))
    own = {PARENT: str(os.getpid()), "BUMPGATE_SHARE": "[]", **({"BUMPGATE_UNTIMED": "1"} if untimed else {})}
    place = {"CUDA_VISIBLE_DEVICES": "3", "TMPDIR": str(project.root)}
    test = "suites/compile/test_a.py::test_timed"
    run = ("-m", "pytest", "-m", "h200", "-n", "0", "--part")
    running = [
        project.start(*run, f"--record=r{i}.json", f"{test}[{i}-h200]", **own, **place) for i in range(2)
    ]
    printed = [process.communicate(timeout=100)[0] for process in running]
    assert all("1 passed" in text for text in printed), printed


MARGINS = """
[margins]
"compile/good/*" = 0.2
"compile/new/*" = 0.2
"compile/absent/*" = 0.2
"compile/typo/*" = 0.2
"""
NEW_AND_ABSENT = """
@lanes("cpu")
def test_new(lane, row):
    row.count("compile/new/graph_breaks", 5, paired=True, **COUNT)

@lanes("cpu")
def test_absent(lane, row, record_property):
    record_property("bumpgate_not_run", '["compile/absent/graph_breaks: no such device"]')
    pytest.skip("not run")
"""


def test_margin_that_matches_no_row_is_noted(project: Project) -> None:
    """Of a whole run, in which a row may be reviewed, paired or not run on this machine."""
    project.tests(NEW_AND_ABSENT + GOOD)
    project.baseline(good=counted("test_good"))
    with (project.root / "lanes/cpu/lane.toml").open("a") as file:
        file.write(MARGINS)
    line = "margin: no row of this run or of the baseline matches 'compile/typo/*' of lanes.cpu.margins: correct it"
    done = project.pytest("-m", "cpu", "-n", "0")
    assert done.code == 0, done.out
    assert [text for text in done.out.splitlines() if text.startswith("margin: ")] == [line]
    assert project.record().provenance["margins"] == [line.removeprefix("margin: ")]
    part = project.pytest("-m", "cpu", "-n", "0", "-k", "good")
    assert part.code == 0, part.out
    assert "margin: " not in part.out
