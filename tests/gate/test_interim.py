"""What a gate says before its verdict: findings of unfinished runs, and the answer of a fast gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate.core.rows import Judgement, Record, Verdict, write_record
from bumpgate.gate import interim as interim_module
from bumpgate.gate.interim import Interim, certain_findings
from bumpgate.gate.state import GateConfig
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import Side
from tests.support.gate_tree import Tree
from tests.support.gating import TIME_ROW, TIME_TEST, Machine, count, labels, seconds
from tests.support.project import wait_for


@pytest.fixture
def interim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interim:
    """90 seconds after the start of a gate."""
    monkeypatch.setattr(interim_module, "time", SimpleNamespace(monotonic=lambda: 90.0))
    sides = {name: Side(name, None) for name in ("adopted", "candidate")}
    records = {name: tmp_path / f"{name}.json" for name in sides}
    return Interim("cpu", sides, records, 0.0, print)


def save(interim: Interim, name: str, *judgements: Judgement) -> None:
    write_record(interim.records[name], {"lane": "cpu"}, judgements, complete=False)


CHANGED = "HOLD so far: CHANGED graph_breaks; compile/a/graph_breaks"


def test_each_cause_is_shown_once_while_the_sides_run(interim: Interim) -> None:
    """Rows of one side, and times, do not hold yet."""
    assert interim.look(progress=True) == []
    save(interim, "adopted", count(), seconds(1.0), count(id="compile/b/graph_breaks"))
    assert interim.look(progress=True) == []
    save(interim, "candidate")
    assert interim.look(progress=True) == []
    save(interim, "candidate", count(), seconds(9.0))
    assert interim.look(progress=True) == ["1.5 min: 2 rows compared: none holds so far"]
    save(interim, "candidate", count(14, Verdict.CHANGED))
    assert interim.look(progress=False) == [f"1.5 min: {CHANGED}"]
    assert interim.look(progress=False) == []
    assert interim.look(progress=True) == ["1.5 min: 1 row compared: 1 cause to hold so far"]


def test_first_answer_has_a_finding_of_a_count_and_a_time() -> None:
    """One cause with two rows, of which the sessions measure one."""
    fields = {"value": None, "interval": None, "witness": 0, "rule": "", "tolerance": 0.0}
    lost = [
        Judgement(replace(j.row, **fields), Verdict.INFRA, "reviewed rows of a file that is gone")
        for j in (count(), seconds(1.0))
    ]
    sides = [
        Side("adopted", Record({"lane": "cpu"}, (count(), seconds(1.0)))),
        Side("candidate", Record({"lane": "cpu"}, tuple(lost))),
    ]
    assert timed_rows(*(side.record for side in sides)) == {TIME_ROW: TIME_TEST}
    (found,) = certain_findings("cpu", *sides)
    assert set(found.rows) == {"compile/a/graph_breaks", TIME_ROW}


def test_watching_thread_says_and_ends(interim: Interim, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    interim.say = said.append
    monkeypatch.setattr(interim_module, "LOOK", 0.01)
    save(interim, "adopted", count())
    with interim.watching():
        save(interim, "candidate", count(14, Verdict.CHANGED))
        wait_for(lambda: said)
    assert [line.partition(": ")[2] for line in said] == [CHANGED]


@pytest.mark.parametrize("broken", [False, True])
def test_fast_gate_runs_no_session_and_cannot_adopt(machine: Machine, out: Path, broken: bool) -> None:
    machine.plant("candidate", counts=[count(14, Verdict.CHANGED) if broken else count()])
    gate = machine.gate(out, GateConfig("cpu", candidate="torch==2.14.0", selection=("--fast",)))
    assert labels(gate) == [*[("HOLD", "CHANGED")] * broken, ("UNKNOWN", "PART")]
    assert not [step for step in machine.processes if step.startswith("timed")]


@pytest.mark.long(20)
def test_fast_option_reports_what_it_left_out(tree: Tree) -> None:
    text = (tree.root / "suites/throughput/test_times.py").read_text()
    tree.write("suites/throughput/test_times.py", text.replace("@lanes", "@pytest.mark.long(9)\n@lanes"))
    found = tree.gate("--fast")
    assert found.code == 125, found.out + found.err
    assert "UNKNOWN  PART --fast measures no time; part of the lane: 2 of 4 rows" in found.out
    assert "-> bumpgate gate --lane cpu --python-adopted" in found.out
    assert "--fast" not in found.out.split("-> ")[1].splitlines()[0]
    assert tree.raw()["sessions"] is None
