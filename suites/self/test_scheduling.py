"""The H200 lane's scheduler in real runs: a worker that dies costs the test it died in, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from suites.kernels.first_call import keep
from suites.self.tree import ROOT
from suites.support.scheduling import MEMORY_SLOTS

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from suites.support.scheduling import TestByTest
def pytest_xdist_make_scheduler(config, log):
    return TestByTest(config, log)
"""
# All of the first workers die at the same time.
TESTS = """
import os, time
import pytest
WORKERS = 3
def told(what):
    with open("ran", "a") as f:
        f.write(what + "\\n")
@pytest.mark.parametrize("i", range(WORKERS))
def test_dies(i):
    told("died")
    while open("ran").read().count("died") < WORKERS:
        time.sleep(0.01)
    os._exit(1)
@pytest.mark.parametrize("i", range(10))
def test_lives(i):
    told(f"lived {i}")
"""


SHARING = """
import pytest
@pytest.fixture
def exclusive_machine(): pass
@pytest.fixture
def most_gpu_memory(): pass
@pytest.mark.parametrize("i", range(6))
def test_timed(i, worker_id, exclusive_machine, record_property):
    record_property("alone", worker_id)
@pytest.mark.parametrize("i", range(8))
def test_large(i, worker_id, most_gpu_memory, record_property):
    record_property("memory", worker_id)
@pytest.mark.parametrize("i", range(8))
def test_other(i, worker_id):
    pass
"""


def run(folder: Path, tests: str, workers: int) -> str:
    """The output of a run of these tests, each worker's tests handed out by ours."""
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "-p", "no:cacheprovider", "test_it.py"]
    command += ["--max-worker-restart=9", "--junitxml=ran.xml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


def test_what_may_not_run_side_by_side_has_one_worker(tmp_path: Path) -> None:
    printed = run(tmp_path, SHARING, workers=4)
    assert "22 passed" in printed, printed
    properties = ElementTree.parse(tmp_path / "ran.xml").iter("property")
    found = {(p.attrib["name"], p.attrib["value"]) for p in properties}
    assert sum(name == "alone" for name, _ in found) == 1
    assert 1 <= sum(name == "memory" for name, _ in found) <= MEMORY_SLOTS


def test_workers_that_die_together_cost_a_test_each(tmp_path: Path) -> None:
    printed = run(tmp_path, TESTS, workers=3)
    assert "3 failed, 10 passed" in printed, printed
    ran = (tmp_path / "ran").read_text().splitlines()
    assert sorted(ran) == sorted(["died"] * 3 + [f"lived {i}" for i in range(10)])


def test_what_one_call_compiled_is_kept_without_touching_what_others_map(tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    for place, text in ((made, "new"), (cache, "old")):
        (place / "shared").mkdir(parents=True)
        (place / "shared" / "launcher.so").write_text(text)
    (made / "kernel").mkdir()
    (made / "kernel" / "kernel.cubin").write_text("code")
    (made / "kernel" / "__grp__kernel.json").write_text(f'{{"cubin": "{made}/kernel/kernel.cubin"}}')
    mapped = (cache / "shared" / "launcher.so").stat().st_ino
    keep(made, cache)
    launcher = cache / "shared" / "launcher.so"
    assert (launcher.read_text(), launcher.stat().st_ino) == ("old", mapped)
    assert (cache / "kernel" / "kernel.cubin").read_text() == "code"
    listed = (cache / "kernel" / "__grp__kernel.json").read_text()
    assert listed == f'{{"cubin": "{cache}/kernel/kernel.cubin"}}'
