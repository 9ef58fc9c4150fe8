"""pytest-benchmark: the median of its fixture is a paired row, and rows are written in its JSON format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bumpgate.plugin.benchmark import row_id
from bumpgate.rows import ROW_ID, Verdict, write_record
from suites.self.foreign import EXAMPLES, LANE, Foreign
from suites.self.reports import HERE, bumpgate, held, judged, row

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


def test_disabled_benchmark_is_red_under_gate(foreign: Foreign) -> None:
    assert foreign.pytest("-m", "mine", "--disable").code == 0
    ran = foreign.pytest("-m", "mine", "--disable", "--gate")
    assert ran.code == 1
    assert "pytest-benchmark is disabled" in ran.out


def test_benchmark_outside_a_lane_writes_no_record(foreign: Foreign) -> None:
    test = foreign.root / "bench/test_sort.py"
    test.write_text(test.read_text().replace("@pytest.mark.mine\n", ""))
    ran = foreign.pytest()
    assert ran.code == 0, ran.out
    assert not (foreign.root / "record.json").exists()


@pytest.mark.parametrize(
    "node", ["test_a.py::test_b", "a/b/test_c.py::TestD::test_e[x-1.5-<f>]", "t.py::test_[é]"]
)
def test_benchmark_id_is_a_valid_row_id(node: str) -> None:
    assert re.fullmatch(ROW_ID, row_id(node))


def test_report_writes_pytest_benchmark_format(tmp_path: Path, monkeypatch, capsys) -> None:
    """Checked once with `pytest-benchmark compare` of 5.3.1, which read the file."""
    path, out = tmp_path / "record.json", tmp_path / "benchmark.json"
    timed = row("throughput/a/step_ms", 5.0, unit="ms", better="lower", interval=(4.0, 6.0))
    write_record(path, HERE, [judged(Verdict.PASS, timed), judged(Verdict.PASS, row())])
    assert bumpgate(monkeypatch, "report", str(path), "--benchmark", str(out)) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    written = json.loads(out.read_text())
    (found,) = written["benchmarks"]
    assert (found["name"], found["group"]) == ("throughput/a/step_ms", "throughput/a")
    stats = found["stats"]
    assert [stats[key] for key in ("min", "median", "max", "rounds")] == [0.004, 0.005, 0.006, 1]
    assert (written["commit_info"]["id"], written["machine_info"]["torch"]) == ("f" * 40, "2.13.0+cpu")


def test_benchmark_report_refuses_gate_and_untimed_record(tmp_path: Path, monkeypatch, capsys) -> None:
    path, out = tmp_path / "record.json", str(tmp_path / "benchmark.json")
    write_record(path, HERE, [judged(Verdict.PASS, row())])
    assert bumpgate(monkeypatch, "report", str(path), "--benchmark", out) == 4
    assert "the record has no row in s, ms, us, ns" in capsys.readouterr().err
    assert bumpgate(monkeypatch, "report", str(held(tmp_path)), "--benchmark", out) == 4
    assert "a gate has two records: pass good.json or bad.json" in capsys.readouterr().err
