"""Fixtures that measure a function of a user: peak memory, work, the seconds of a compile."""

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
        "memory/a64/peak_mib": "NEW",
        "memory/a96/peak_mib": "NEW",
        "memory/none/peak_bytes": "INSTRUMENT",
    }, ran.out


WORK = """
import pytest
import torch

@pytest.mark.mine
def test_work(row, count_work):
    a, b = torch.ones(16, 32), torch.ones(32, 8)
    work = count_work(lambda: (a @ b).relu().t())
    row.count("work/a/flops", work.flops, unit="FLOPs", seen=work, expected=2 * 16 * 32 * 8)
    row.count("work/a/bytes", work.bytes, unit="bytes", seen=work, expected=4 * (512 + 256 + 3 * 128))
    row.count("work/a/operators", work.operators, unit="operators", seen=work, expected=3)

@pytest.mark.mine
def test_cold(row, inductor_watch):
    for case, cold in (("first", False), ("warm", False), ("cold", True)):
        with inductor_watch(cold=cold) as report:
            torch.compile(torch.sin)(torch.ones(4))
        row.count(f"compile/{case}/misses", report.caches.fx_miss or 0, seen=report)
        row.bound(f"compile/{case}/cpu_seconds", report.cpu_seconds, "s", seen=report, at_least=1e-6)
"""


def test_work_and_compiles_of_a_function_are_counted(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("bumpgate.toml", LANE)
    foreign.write("tests/test_work.py", WORK)
    ran = foreign.pytest("-m", "mine", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    found = {j.row.id: (j.reason, j.row.value) for j in foreign.record().judgements}
    seconds = [found.pop(f"compile/{case}/cpu_seconds")[1] for case in ("first", "warm", "cold")]
    assert all(seconds), ran.out
    values = {"work/a/flops": 8192, "work/a/bytes": 4608, "work/a/operators": 3}
    values |= {"compile/first/misses": 1, "compile/warm/misses": 0, "compile/cold/misses": 1}
    assert {id: value for id, (_, value) in found.items()} == values, ran.out
