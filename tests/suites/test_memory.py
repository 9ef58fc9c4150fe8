"""The peak of a process's resident memory, and the wait for the memory of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.plugin.rows import InfraError
from suites.support.gpu_memory import wait_for_free
from suites.support.planted import planted
from tests.support.tree import ROOT

MIB = 2**20
INSTRUMENT = ROOT / "suites/support/instruments/memory.py"
PROGRAM = f"""
import runpy
read = runpy.run_path("{INSTRUMENT}")["peak_rss_bytes"]
started = read()
held = bytearray({200 * MIB})
del held
print(started, read())
"""

MAPPED = f"""
import mmap, runpy, sys
read = runpy.run_path("{INSTRUMENT}")
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    read_pages = sum(pages[i] for i in range(0, len(pages), mmap.PAGESIZE))
before = read["peak_memory_bytes"]()
held = bytearray({100 * MIB})
del held
print(before, read["peak_memory_bytes"](), read["peak_rss_bytes"]())
"""


@planted("C37", "a large parent process, whose peak getrusage passes on to its children")
def test_peak_memory_is_that_of_the_process_alone() -> None:
    parent = bytearray(b"1") * (400 * MIB)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    started, peak = map(int, done.stdout.split())
    assert len(parent) > started
    assert started < 100 * MIB
    assert 200 * MIB <= peak < 300 * MIB


@planted("C37", "a file in the page cache, all of whose pages a process has mapped")
def test_peak_memory_excludes_pages_of_files(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"1" * (200 * MIB))
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(file)], capture_output=True, text=True, check=True
    )
    before, peak, resident = map(int, done.stdout.split())
    assert resident >= 300 * MIB
    assert before < 50 * MIB
    assert 100 * MIB <= peak < 150 * MIB


def test_claim_waits_until_the_memory_is_free() -> None:
    """A test whose neighbours hold the card is a fault of the machine, not of the build."""
    free = iter([3.7, 40.0, 52.5])
    wait_for_free(52, lambda: next(free), seconds=60)
    with pytest.raises(
        InfraError, match=r"^3\.7 GiB of the GPU's memory are free, and this test needs 52: end what"
    ):
        wait_for_free(52, lambda: 3.7, seconds=0.1)
