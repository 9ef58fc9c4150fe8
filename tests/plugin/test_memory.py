"""The fixture `peak_memory`: what a function holds at once, in a project of a user."""

from __future__ import annotations

from pathlib import Path

from tests.support.foreign import LANE, Foreign

TEST = """
import pytest
import torch

@pytest.mark.mine
@pytest.mark.parametrize("mib", [64, 96])
def test_peak(row, peak_memory, mib):
    peak = peak_memory(lambda: torch.ones(mib * 2**18).sum())
    row.bound(f"memory/a{mib}/peak_mib", peak.bytes // 2**20, "MiB", expected=mib, seen=peak)

@pytest.mark.mine
def test_nothing(row, peak_memory):
    row.exact("memory/none/peak_bytes", 0, "bytes", seen=peak_memory(lambda: None))
"""


def test_the_peak_is_of_one_call_and_above_the_start(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("bumpgate.toml", LANE)
    foreign.write("tests/test_memory.py", TEST)
    ran = foreign.pytest("-m", "mine")
    found = foreign.verdicts()
    assert found == {
        "memory/a64/peak_mib": "MISSING",
        "memory/a96/peak_mib": "MISSING",
        "memory/none/peak_bytes": "INSTRUMENT",
    }, ran.out
