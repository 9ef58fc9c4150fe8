"""pytest-benchmark: the median of its fixture is a paired row, and rows are written in its JSON format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.foreign import EXAMPLES, LANE, Foreign

# A lane test with the fixture `benchmark` has the machine to itself.
ALONE = """
import fcntl
import pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item):
    from bumpgate.plugin import timing

    if item.get_closest_marker("mine"):
        with open(f"{timing.LOCK}.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
"""
REAL = ("-p", "pytest_benchmark.plugin")
ID = "benchmark/bench-test_sort-test_sort/median_seconds"


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", LANE)
    made.write("pytest.ini", "[pytest]\n")
    made.write("conftest.py", ALONE)
    (text,) = [text for text in EXAMPLES if "(benchmark)" in text]
    made.write("bench/test_sort.py", text)
    return made


def test_median_of_a_benchmark_is_a_paired_row(foreign: Foreign) -> None:
    ran = foreign.pytest(*REAL, "-m", "mine", "--gate", "--benchmark-json=.tmp/own.json")
    assert ran.code == 0, ran.out + ran.err
    (found,) = foreign.record().judgements
    row = found.row
    assert (row.id, row.unit, row.better) == (ID, "s", "lower")
    (own,) = json.loads((foreign.root / ".tmp/own.json").read_text())["benchmarks"]
    assert (row.value, row.witness) == (own["stats"]["median"], own["stats"]["rounds"])
    assert (row.paired, row.test) == (True, "bench/test_sort.py::test_sort")
    accepted = foreign.bumpgate("rebaseline", "--lane", "mine")
    assert accepted.code == 0, accepted.err
    assert json.loads((foreign.root / "baselines/mine.json").read_text())["rows"] == {}, "not a reviewed row"


def test_disabled_benchmark_is_not_run_by_name(foreign: Foreign) -> None:
    ran = foreign.pytest(*REAL, "-m", "mine", "--benchmark-disable")
    assert ran.code == 0
    assert f"{ID}: pytest-benchmark is disabled" in ran.out
    assert foreign.pytest(*REAL, "-m", "mine", "--benchmark-disable", "--gate").code == 1


def test_benchmark_is_timed_saved_and_compared_next_to_workers(foreign: Foreign) -> None:
    """One worker measures alone. An option that compares takes one process by default, and refuses a given number."""
    foreign.write("conftest.py", "")
    foreign.write("bench/test_other.py", "import pytest\n@pytest.mark.mine\ndef test_other(): pass\n")
    workers = (*REAL, "-p", "xdist", "-m", "mine", "-n")
    ran = foreign.pytest(*workers, "2", "--gate", "--benchmark-save=first")
    assert ran.code == 0, ran.out + ran.err
    assert "xdist plugin is active" not in ran.out + ran.err
    (found,) = foreign.record().judgements
    assert found.row.id == ID
    assert found.row.interval[0] <= found.row.value <= found.row.interval[1]
    (saved,) = (foreign.root / ".benchmarks").rglob("*_first.json")
    (own,) = json.loads(saved.read_text())["benchmarks"]
    assert own["stats"]["median"] == found.row.value
    compared = foreign.pytest(*workers, "auto", "--benchmark-compare")
    assert compared.code == 0, compared.out + compared.err
    assert "test_sort (0001_first)" in compared.out
    refused = foreign.pytest(*workers, "2", "--benchmark-compare-fail=median:5%")
    assert refused.code == 4
    assert "--benchmark-compare-fail needs all benchmarks in one process: add -n 0" in refused.err


def test_benchmark_outside_a_lane_writes_no_record(foreign: Foreign) -> None:
    test = foreign.root / "bench/test_sort.py"
    test.write_text(test.read_text().replace("@pytest.mark.mine\n", ""))
    ran = foreign.pytest(*REAL)
    assert ran.code == 0, ran.out
    assert not (foreign.root / "record.json").exists()
