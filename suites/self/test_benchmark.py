"""pytest-benchmark's fixture in a lane: its median is a paired row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bumpgate.plugin.benchmark import row_id
from bumpgate.rows import ROW_ID
from suites.self.foreign import EXAMPLES, LANE, Foreign

# The parts of pytest-benchmark's fixture that the plugin reads (checked with 5.3.1).
BENCHMARK = """
import fcntl, types
import pytest

@pytest.fixture
def benchmark(request):
    from bumpgate.plugin import timing

    class Benchmark:
        disabled, stats = request.config.option.disable, None
        def __call__(self, function, *args):
            if request.node.get_closest_marker("mine"):  # a lane test with it has the machine to itself
                with open(f"{timing.LOCK}.lock") as lock, pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not self.disabled:
                data = dict(median=0.5, rounds=5, min=0.25, max=1.0)
                self.stats = types.SimpleNamespace(stats=types.SimpleNamespace(**data))
            return function(*args)
    return Benchmark()

def pytest_addoption(parser):
    parser.addoption("--disable", action="store_true")
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", LANE)
    made.write("pytest.ini", "[pytest]\n")
    made.write("conftest.py", BENCHMARK)
    (text,) = [text for text in EXAMPLES if "(benchmark)" in text]
    made.write("bench/test_sort.py", text)
    return made


def test_median_of_a_benchmark_is_a_paired_row(foreign: Foreign) -> None:
    ran = foreign.pytest("-m", "mine", "--gate")
    assert ran.code == 0, ran.out + ran.err
    (found,) = foreign.record().judgements
    row = found.row
    assert (row.id, row.value, row.unit, row.better) == (
        "benchmark/bench-test_sort-test_sort/median_seconds",
        0.5,
        "s",
        "lower",
    )
    assert (row.paired, row.witness, row.test) == (True, 5, "bench/test_sort.py::test_sort")
    accepted = foreign.bumpgate("rebaseline", "--lane", "mine")
    assert accepted.code == 0, accepted.err
    assert json.loads((foreign.root / "baselines/mine.json").read_text())["rows"] == {}, "not a reviewed row"


def test_a_disabled_benchmark_is_red_under_gate(foreign: Foreign) -> None:
    assert foreign.pytest("-m", "mine", "--disable").code == 0
    ran = foreign.pytest("-m", "mine", "--disable", "--gate")
    assert ran.code == 1
    assert "pytest-benchmark is disabled" in ran.out


def test_a_benchmark_outside_a_lane_is_left_alone(foreign: Foreign) -> None:
    test = foreign.root / "bench/test_sort.py"
    test.write_text(test.read_text().replace("@pytest.mark.mine\n", ""))
    ran = foreign.pytest()
    assert ran.code == 0, ran.out
    assert not (foreign.root / "record.json").exists()


@pytest.mark.parametrize(
    "node", ["test_a.py::test_b", "a/b/test_c.py::TestD::test_e[x-1.5-<f>]", "t.py::test_[é]"]
)
def test_a_benchmark_id_is_a_row_id(node: str) -> None:
    assert re.fullmatch(ROW_ID, row_id(node))
