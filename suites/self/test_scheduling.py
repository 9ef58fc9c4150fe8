"""The H200 lane's scheduler in real runs: a worker that dies costs the test it died in, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from suites.kernels.first_call import keep
from suites.self.tree import ROOT

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


def test_workers_that_die_together_cost_a_test_each(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "test_dying.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "3",
        "-p",
        "no:cacheprovider",
        "--max-worker-restart=9",
        "test_dying.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "3 failed, 10 passed" in done.stdout, done.stdout
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
