"""pytest-benchmark: the median of its fixture is a paired row, and rows are written in its JSON format."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.core.rows import ROW_ID, Verdict, write_record
from bumpgate.plugin.benchmark import row_id
from tests.support.foreign import EXAMPLES, LANE, Foreign
from tests.support.reports import HERE, bumpgate, held, judged, row

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
    assert (row.id, row.unit, row.better) == (
        "benchmark/bench-test_sort-test_sort/median_seconds",
        "s",
        "lower",
    )
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


@pytest.mark.parametrize(
    "node", ["test_a.py::test_b", "a/b/test_c.py::TestD::test_e[x-1.5-<f>]", "t.py::test_[é]"]
)
def test_benchmark_id_is_a_valid_row_id(node: str) -> None:
    assert re.fullmatch(ROW_ID, row_id(node))


def test_report_writes_pytest_benchmark_format(tmp_path: Path, monkeypatch, capsys) -> None:
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


def test_pytest_benchmark_compares_two_reports(tmp_path: Path, monkeypatch, capsys) -> None:
    for name, value in (("good", 5.0), ("bad", 6.0)):
        timed = row("throughput/a/step_ms", value, unit="ms", better="lower", interval=(4.0, 8.0))
        write_record(tmp_path / f"{name}.json", HERE, [judged(Verdict.PASS, timed)])
        out = str(tmp_path / f"{name}.benchmark.json")
        assert bumpgate(monkeypatch, "report", str(tmp_path / f"{name}.json"), "--benchmark", out) == 0
    compare = "from pytest_benchmark.cli import main; main()"
    files = [str(tmp_path / f"{name}.benchmark.json") for name in ("good", "bad")]
    columns = ["--columns=min,median,max", "--name=long", f"--csv={tmp_path / 'compared'}"]
    done = subprocess.run(
        [sys.executable, "-c", compare, "compare", *files, *columns],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "throughput/a" in done.stdout
    with (tmp_path / "compared.csv").open() as table:
        medians = {line["median"] for line in csv.DictReader(table)}
    assert medians == {"0.005", "0.006"}


def test_benchmark_report_refuses_gate_and_untimed_record(tmp_path: Path, monkeypatch, capsys) -> None:
    path, out = tmp_path / "record.json", str(tmp_path / "benchmark.json")
    write_record(path, HERE, [judged(Verdict.PASS, row())])
    assert bumpgate(monkeypatch, "report", str(path), "--benchmark", out) == 4
    assert "the record has no row in s, ms, us, ns" in capsys.readouterr().err
    assert bumpgate(monkeypatch, "report", str(held(tmp_path)), "--benchmark", out) == 4
    assert "a gate has two records: pass adopted.json or candidate.json" in capsys.readouterr().err
