"""A time that is read once and misses a bound of its test on one side alone is read once more on both sides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate.core.baseline import Reviewed, load, save
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Judgement, Record, Row, Value, Verdict, read_record, write_record
from bumpgate.gate import interim, runner, state
from bumpgate.gate.interim import Interim
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.remeasure import MOST_TESTS, better_reading, outside_on_one_side
from bumpgate.gate.state import GateConfig
from bumpgate.gate.verdict import Side
from bumpgate.process.gpu_shares import divide
from bumpgate.process.runner import LaneCall, LaneRun
from tests.support.gate_tree import Tree
from tests.support.gating import Machine, attach, count, labels

ROW = "kernels/a/first_call_cpu_seconds"
TEST = "suites/kernels/test_s.py::test_first_call[a-cpu]"
ON_GPU = GateConfig("h200", candidate="torch==2.14.0")
SIDES = ("adopted", "candidate")
OTHER = "read twice, the better reading counts; the other: "


def reading(value: Value, id: str = ROW, **fields: object) -> Judgement:
    """Return a time with a bound of 20 s, as a lane judges it."""
    made = {"id": id, "value": value, "unit": "s", "witness": 1, "rule": "C37", "test": TEST}
    row = Row(**made | {"better": "derived", "at_most": 20, "evidence": (f"{value} s",)} | fields)  # type: ignore[arg-type]
    outside = isinstance(value, float) and value > 20
    return Judgement(row, Verdict.REGRESSION if outside else Verdict.PASS, "expected at most 20")


def readings(machine: Machine, adopted: Sequence[float], candidate: Sequence[float]) -> None:
    """Let each side read these seconds, the second ones when the test runs once more."""
    for name, (first, second) in zip(SIDES, (adopted, candidate)):
        machine.plant(name, counts=[count(), reading(first)], second=[reading(second)])


def stored(out: Path, name: str, row: str = ROW) -> Judgement:
    return {j.row.id: j for j in read_record(out / f"{name}.json").judgements}[row]


def printed(out: Path) -> list[str]:
    return [line for line in (out / "output.txt").read_text().splitlines() if "read once more" in line]


def reruns(machine: Machine) -> list[str]:
    return [step.removeprefix(f"{TEST}:") for step in machine.processes if step.startswith(TEST)]


def test_second_reading_within_the_bound_does_not_hold(machine: Machine, out: Path) -> None:
    """The readings of a gate of torch 2.15.0 on an H200, next to 30 workers: 19.87 and 20.46 s."""
    readings(machine, (19.87, 21.0), (20.46, 13.1))
    gate = machine.gate(out)
    assert (gate.decision, gate.findings) == (Decision.ADOPT, ())
    assert reruns(machine) == ["adopted", "candidate"]
    adopted, candidate = (stored(out, name) for name in SIDES)
    assert (adopted.row.value, adopted.verdict) == (19.87, Verdict.PASS)
    assert (candidate.row.value, candidate.verdict) == (13.1, Verdict.PASS)
    assert adopted.row.evidence == ("19.87 s", f"{OTHER}21 s")
    assert candidate.row.evidence == ("13.1 s", f"{OTHER}20.46 s")
    (line,) = printed(out)
    begin = f"1 time outside of a bound on one side, read once more on both: {ROW}; still outside: none; "
    assert line.startswith(begin)
    lines = (out / "output.txt").read_text().splitlines()
    assert lines[lines.index(line) + 1] == "first answer: only the times can still hold the candidate"


def test_adopted_side_is_read_again_as_well(machine: Machine, out: Path) -> None:
    """Without a second reading the candidate would have FIXED it."""
    readings(machine, (20.46, 15.0), (19.87, 30.0))
    gate = machine.gate(out)
    assert (gate.decision, gate.findings) == (Decision.ADOPT, ())
    assert [stored(out, name).row.value for name in SIDES] == [15.0, 19.87]


@pytest.mark.parametrize(("adopted", "candidate"), [(13.0, 19.0), (21.0, 25.0)], ids=["inside", "outside"])
def test_readings_on_one_side_of_the_bound_are_kept(
    machine: Machine, out: Path, adopted: float, candidate: float
) -> None:
    readings(machine, (adopted, 1.0), (candidate, 1.0))
    gate = machine.gate(out)
    assert (reruns(machine), printed(out), gate.sides["candidate"].read_again) == ([], [], False)


def test_fast_gate_reads_no_time_again(machine: Machine, out: Path) -> None:
    readings(machine, (19.87, 19.0), (20.46, 13.1))
    gate = machine.gate(out, GateConfig("cpu", candidate="torch==2.14.0", selection=("--fast",)))
    assert ("HOLD", "REGRESSION") in labels(gate)
    assert reruns(machine) == []


@pytest.mark.parametrize(("tests", "read"), [(MOST_TESTS, True), (MOST_TESTS + 1, False)])
def test_many_tests_outside_are_no_accident(tests: int, read: bool) -> None:
    def sides(test: str) -> list[Record]:
        times = ([reading(x, f"k/k{i}/s", test=test.format(i)) for i in range(tests)] for x in (19.0, 21.0))
        return [Record({}, tuple(each)) for each in times]

    assert len(outside_on_one_side(*sides("t::{}"))) == (tests if read else 0)
    assert len(outside_on_one_side(*sides("t::0"))) == tests, "many rows of one test are one accident"


PAIRS = {
    "count": (count(13, id=ROW), replace(count(14, id=ROW), verdict=Verdict.REGRESSION)),
    "accepted": (reading(19.0), replace(reading(21.0), accepted="ann, until 2027: why")),
    "unit": (reading(19.0, unit="ms"), reading(21.0)),
    "infinite": (reading(19.0), reading(float("inf"))),
    "unmeasured": (reading(None, witness=0), reading(21.0)),
    "instrument": (replace(reading(19.0), verdict=Verdict.INSTRUMENT), reading(21.0)),
}
FIELDS = {
    "interval": {"better": "lower", "interval": (1, 30)},
    "paired": {"better": "lower", "paired": True},
    "two bounds": {"at_least": 1},
    "error": {"unit": "ratio", "id": "a/b/error_ratio"},
    "no bound": {"better": "lower", "at_most": None, "tolerance": 0.1},
}
PAIRS |= {name: (reading(9.0, **more), reading(21.0, **more)) for name, more in FIELDS.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAIRS)
def test_other_differences_are_not_read_again(name: str) -> None:
    assert outside_on_one_side(*(Record({}, (j,)) for j in PAIRS[name])) == {}


def test_better_reading_follows_the_direction_of_the_row() -> None:
    faster, slower = reading(3.0, at_most=None, at_least=1), reading(2.0, at_most=None, at_least=1)
    assert better_reading(slower, faster).row.value == better_reading(faster, slower).row.value == 3.0
    assert better_reading(reading(3.0), reading(2.0)).row.value == 2.0
    first = reading(21.0)
    for unusable in (reading(None, witness=0), replace(reading(1.0), verdict=Verdict.INFRA)):
        assert better_reading(first, unusable) is first


def test_other_rows_keep_their_first_value(machine: Machine, out: Path) -> None:
    """Rows and faults that only the second run has are added; what the machine disturbed in it is not."""

    def of_test(value: int, id: str) -> Judgement:
        return replace(count(value, id=id), row=replace(count(value, id=id).row, test=TEST))

    for name, seconds in zip(SIDES, (13.0, 21.0)):
        first = [count(), reading(seconds), of_test(11, "kernels/a/kernels")]
        second = [reading(13.0), of_test(12, "kernels/a/kernels"), of_test(1, "kernels/a/late")]
        machine.plant(name, counts=first, second=second)
    gate = machine.gate(out)
    assert (gate.decision, gate.findings) == (Decision.ADOPT, ())
    for name in SIDES:
        assert stored(out, name, "kernels/a/kernels").row.value == 11
        assert stored(out, name, "kernels/a/late").row.value == 1


@pytest.mark.parametrize(
    ("problem", "expected"),
    [("assert 1 == 2", [("HOLD", "PROBLEM")]), ("skipped under --gate: later", [])],
    ids=["failure", "skip, which the first run counts"],
)
def test_failure_in_the_second_run_holds(
    machine: Machine, out: Path, problem: str, expected: list[tuple[str, str]]
) -> None:
    readings(machine, (13.0, 13.0), (21.0, 13.0))
    machine.plant("candidate", second_problems=(f"{TEST}: {problem}",))
    assert labels(machine.gate(out)) == expected


def test_second_run_that_is_cut_short_changes_nothing(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        runs = machine.run_lanes(calls, timeout)
        for i, call in enumerate(calls):
            if call.python.name == "candidate" and TEST in call.selection:
                assert runs[i].record
                runs[i] = replace(
                    runs[i], record=replace(runs[i].record, complete=False), failure="died of SIGSEGV"
                )
        return runs

    monkeypatch.setattr(runner, "run_lanes", run)
    readings(machine, (13.0, 12.0), (21.0, 13.0))
    assert labels(machine.gate(out)) == [("HOLD", "REGRESSION")]
    assert (stored(out, "adopted").row.value, stored(out, "candidate").row.evidence) == (12.0, ("21.0 s",))
    words = f"; candidate: not read, died of SIGSEGV (log: {out / 'bounds-candidate.log'})"
    assert printed(out)[0].endswith(words)


def test_readings_are_taken_on_empty_compile_caches(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides at once on their GPUs; on filled caches a time that includes a compilation would always pass."""
    seen: list[list[LaneCall]] = []

    def run(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        seen.extend([[*calls]] if TEST in calls[0].selection else [])
        return machine.run_lanes(calls, timeout)

    monkeypatch.setattr(runner, "run_lanes", run)
    readings(machine, (13.0, 12.0), (21.0, 13.0))
    machine.gate(out, ON_GPU, shares=divide(["0", "1", "2", "3"], 1, range(8)))
    ((adopted, candidate),) = seen
    assert [call.environment["CUDA_VISIBLE_DEVICES"] for call in (adopted, candidate)] == ["0,1", "2,3"]
    assert adopted.selection == candidate.selection == ["-n", "0", TEST]
    caches = [call.environment["TORCHINDUCTOR_CACHE_DIR"] for call in (adopted, candidate)]
    for call, cache in zip((adopted, candidate), caches):
        assert cache not in machine.caches(call.python.name).values()
        assert not Path(cache).exists()
        assert call.environment["BUMPGATE_ROUNDS"] == "15"
    assert len({*caches}) == 2


@pytest.mark.parametrize("lane", ["cpu", "h200"])
def test_killed_gate_does_not_repeat_the_second_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """The sides take turns, and each is saved."""
    config = GateConfig(lane, candidate="torch==2.14.0")
    for at in (5, 6, 7):
        machine, out = Machine(tmp_path / f"tree{at}"), tmp_path / f"out{at}"
        attach(machine, monkeypatch)
        readings(machine, (19.87, 21.0), (20.46, 13.1))
        machine.kill(out, config, lambda machine=machine, at=at: len(machine.processes) == at)
        assert reruns(machine) == ["adopted", "candidate"][: at - 4]
        assert machine.gate(out, config).decision is Decision.ADOPT
        assert reruns(machine) == ["adopted", "candidate"]
        assert [len(stored(out, name).row.evidence) for name in SIDES] == [2, 2]


def test_two_readings_outside_hold_and_no_third_is_taken(machine: Machine, out: Path) -> None:
    """The gate is killed in its first session."""
    readings(machine, (13.0, 14.0), (26.5, 25.5))
    machine.kill(out, when=lambda: bool(machine.bench and machine.bench.gate.paired))
    assert f"still outside: {ROW}; " in printed(out)[0]
    raw = json.loads((out / state.NAME).read_text())
    assert [side["read_again"] for side in raw["sides"].values()] == [True, True]
    raw["sessions"] = None  # killed before the sessions were saved
    (out / state.NAME).write_text(json.dumps(raw))
    gate = machine.gate(out)
    assert labels(gate) == [("HOLD", "REGRESSION")]
    candidate = gate.findings[0].candidate
    assert (candidate[0], candidate[2]) == (f"{ROW}: 25.5 s (C37)", f"{OTHER}26.5 s")
    assert reruns(machine) == ["adopted", "candidate"]


FIRST_CALL = """
@lanes("cpu")
def test_first_call(lane, row):
    seen = os.path.join(os.environ["BUMPGATE_HOME"], os.environ["SIDE"])
    again = os.path.exists(seen)
    open(seen, "w").close()
    seconds = 20.46 if os.environ["SIDE"] == "candidate" and not again else 13.1 + again
    entries = len(os.listdir(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    open(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "compiled"), "w").close()
    row.bound("kernels/a/first_call_cpu_seconds", seconds, "s", rule="C37", at_most=20, seen=1,
        evidence=[f"{entries} entries, worker {os.environ.get('PYTEST_XDIST_WORKER')}"])
"""


@pytest.mark.long(20)
def test_real_processes_read_on_an_empty_cache(tree: Tree) -> None:
    tree.tests(FIRST_CALL, "suites/kernels/test_s.py")
    path = tree.root / "baselines/cpu.json"
    rows = load(path, "cpu")
    reviewed = Reviewed(13.0, "s", "derived", test="suites/kernels/test_s.py::test_first_call[cpu]")
    save(path, replace(rows, rows={**rows.rows, ROW: reviewed}))
    done = tree.gate("--", "suites/canaries", "suites/kernels")
    assert done.code == 0, done.out + done.err
    assert f"outside of a bound on one side, read once more on both: {ROW}; still outside: none" in done.err
    adopted, candidate = (stored(tree.root / "g", name).row for name in SIDES)
    assert (adopted.value, adopted.evidence) == (13.1, ("0 entries, worker gw0", f"{OTHER}14.1 s"))
    assert (candidate.value, candidate.evidence) == (14.1, ("0 entries, worker None", f"{OTHER}20.46 s"))


def test_gate_file_of_an_earlier_version_can_be_read(machine: Machine, out: Path) -> None:
    machine.gate(out)
    raw = json.loads((out / state.NAME).read_text())
    for side in raw["sides"].values():
        assert side.pop("read_again") is False
    (out / state.NAME).write_text(json.dumps(raw))
    gate = state.read(out, SessionPlan())
    assert gate
    assert not gate.sides["candidate"].read_again


@pytest.mark.parametrize("again", [True, False])
def test_time_to_be_read_again_does_not_hold_so_far(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast gate reports it at once."""
    monkeypatch.setattr(interim, "time", SimpleNamespace(monotonic=lambda: 90.0))
    records = {name: tmp_path / f"{name}.json" for name in SIDES}
    for name, seconds in zip(SIDES, (19.87, 20.46)):
        write_record(records[name], {"lane": "cpu"}, [reading(seconds)], complete=False)
    sides = {name: Side(name, None) for name in SIDES}
    found = Interim("cpu", sides, records, 0.0, print, again).look(progress=True)
    held = f"1.5 min: HOLD so far: REGRESSION first_call_cpu_seconds: 20.46 s; {ROW}"
    assert found == (["1.5 min: 1 row compared: none holds so far"] if again else [held])
