"""The peak of a process's resident memory."""

from __future__ import annotations

import subprocess
import sys

from suites.support.planted import planted
from tests.support.tree import ROOT

MIB = 2**20
PROGRAM = f"""
import runpy
read = runpy.run_path("{ROOT / "suites/support/instruments/memory.py"}")["peak_rss_bytes"]
started = read()
held = bytearray({200 * MIB})
del held
print(started, read())
"""


@planted("C37", "a large parent process, whose peak getrusage passes on to its children")
def test_peak_memory_is_that_of_the_process_alone() -> None:
    parent = bytearray(b"1") * (400 * MIB)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    started, peak = map(int, done.stdout.split())
    assert len(parent) > started
    assert started < 100 * MIB
    assert 200 * MIB <= peak < 300 * MIB
