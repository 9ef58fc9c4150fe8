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
    id = "benchmark/bench-test_sort-test_sort/median_seconds"
    assert (row.id, row.unit, row.better) == (id, "s", "lower")
    (own,) = json.loads((foreign.root / ".tmp/own.json").read_text())["benchmarks"]
    assert (row.value, row.witness) == (own["stats"]["median"], own["stats"]["rounds"])
    assert (row.paired, row.test) == (True, "bench/test_sort.py::test_sort")
    accepted = foreign.bumpgate("rebaseline", "--lane", "mine")
    assert accepted.code == 0, accepted.err
    assert json.loads((foreign.root / "baselines/mine.json").read_text())["rows"] == {}, "not a reviewed row"


def test_disabled_benchmark_is_red_under_gate(foreign: Foreign) -> None:
    assert foreign.pytest(*REAL, "-m", "mine", "--benchmark-disable").code == 0
    ran = foreign.pytest(*REAL, "-m", "mine", "--benchmark-disable", "--gate")
    assert ran.code == 1
    assert "pytest-benchmark is disabled" in ran.out


def test_benchmark_outside_a_lane_writes_no_record(foreign: Foreign) -> None:
    test = foreign.root / "bench/test_sort.py"
    test.write_text(test.read_text().replace("@pytest.mark.mine\n", ""))
    ran = foreign.pytest(*REAL)
    assert ran.code == 0, ran.out
    assert not (foreign.root / "record.json").exists()
