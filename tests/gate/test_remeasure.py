"""A time that is read once and misses a bound of its test on one side alone is read once more on both sides."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.baseline import Reviewed, load, save
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Judgement, Record, Row, Value, Verdict, read_record, write_record
from bumpgate.gate import runner, state
from bumpgate.gate.interim import Interim
from bumpgate.gate.options import GateConfig
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.remeasure import MOST_TESTS, better_reading, outside_on_one_side
from bumpgate.gate.verdict import Side
from bumpgate.process.gpu_shares import divide
from bumpgate.process.runner import LaneCall, LaneRun
from tests.support.gate_tree import Tree
from tests.support.gating import Machine, attach, count, labels

ROW = "kernels/a/first_call_cpu_seconds"
TEST = "suites/kernels/test_s.py::test_first_call[a-cpu]"
ON_GPU = GateConfig("h200", candidate="torch==2.14.0")


def reading(value: Value, id: str = ROW, **fields: object) -> Judgement:
    """Return a time with a bound of 20 s, as a lane judges it."""
    made = {"id": id, "value": value, "unit": "s", "witness": 1, "rule": "C37", "test": TEST}
    row = Row(**made | {"better": "derived", "at_most": 20, "evidence": (f"{value} s",)} | fields)  # type: ignore[arg-type]
    outside = isinstance(value, float) and value > 20
    return Judgement(row, Verdict.REGRESSION if outside else Verdict.PASS, "expected at most 20")


def readings(machine: Machine, adopted: Sequence[float], candidate: Sequence[float]) -> None:
    """Let each side read these seconds, the second ones when the test runs once more."""
    for name, values in (("adopted", adopted), ("candidate", candidate)):
        side = machine.sides[name]
        side.counts, side.second = [count(), reading(values[0])], [reading(values[1])]


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
    adopted, candidate = stored(out, "adopted"), stored(out, "candidate")
    assert (adopted.row.value, adopted.verdict) == (19.87, Verdict.PASS)
    assert (candidate.row.value, candidate.verdict) == (13.1, Verdict.PASS)
    other = "read twice, the better reading counts; the other: "
    assert adopted.row.evidence == ("19.87 s", f"{other}21 s")
    assert candidate.row.evidence == ("13.1 s", f"{other}20.46 s")
    (line,) = printed(out)
    begin = f"1 time outside of a bound on one side, read once more on both: {ROW}; still outside: none; "
    assert line.startswith(begin)
    lines = (out / "output.txt").read_text().splitlines()
    assert lines[lines.index(line) + 1] == "first answer: only the times can still hold the candidate"


def test_two_readings_outside_of_the_bound_hold(machine: Machine, out: Path) -> None:
    readings(machine, (13.0, 14.0), (26.5, 25.5))
    gate = machine.gate(out)
    assert labels(gate) == [("HOLD", "REGRESSION")]
    candidate = gate.findings[0].candidate
    assert candidate[0] == f"{ROW}: 25.5 s (C37)"
    assert candidate[2] == "read twice, the better reading counts; the other: 26.5 s"
    assert f"still outside: {ROW}; " in printed(out)[0]


def test_adopted_side_is_read_again_as_well(machine: Machine, out: Path) -> None:
    """Without a second reading the candidate would have FIXED it."""
    readings(machine, (20.46, 15.0), (19.87, 30.0))
    gate = machine.gate(out)
    assert (gate.decision, gate.findings) == (Decision.ADOPT, ())
    assert (stored(out, "adopted").row.value, stored(out, "candidate").row.value) == (15.0, 19.87)


@pytest.mark.parametrize(("adopted", "candidate"), [(13.0, 19.0), (21.0, 25.0)], ids=["inside", "outside"])
def test_readings_on_one_side_of_the_bound_are_kept(
    machine: Machine, out: Path, adopted: float, candidate: float
) -> None:
    readings(machine, (adopted, 1.0), (candidate, 1.0))
    machine.gate(out)
    assert (reruns(machine), printed(out)) == ([], [])
    assert not state.read(out, SessionPlan()).sides["candidate"].read_again  # type: ignore[union-attr]


def test_fast_gate_reads_no_time_again(machine: Machine, out: Path) -> None:
    readings(machine, (19.87, 19.0), (20.46, 13.1))
    gate = machine.gate(out, GateConfig("cpu", candidate="torch==2.14.0", selection=("--fast",)))
    assert ("HOLD", "REGRESSION") in labels(gate)
    assert reruns(machine) == []


@pytest.mark.parametrize(("tests", "read"), [(MOST_TESTS, True), (MOST_TESTS + 1, False)])
def test_many_tests_outside_are_no_accident(tests: int, read: bool) -> None:
    before, after = (
        Record(
            {},
            tuple(reading(x, f"kernels/k{i}/first_call_cpu_seconds", test=f"t::{i}") for i in range(tests)),
        )
        for x in (19.0, 21.0)
    )
    assert len(outside_on_one_side(before, after)) == (tests if read else 0)
    # Many rows of one test are one accident.
    one = [replace(r, judgements=tuple(with_test(j, "t::0") for j in r.judgements)) for r in (before, after)]
    assert len(outside_on_one_side(*one)) == tests


def with_test(j: Judgement, test: str) -> Judgement:
    return replace(j, row=replace(j.row, test=test))


@pytest.mark.parametrize(
    ("adopted", "candidate"),
    [
        (count(13, id=ROW), replace(count(14, id=ROW), verdict=Verdict.REGRESSION)),
        (reading(19.0, better="lower", interval=(1, 30)), reading(21.0, better="lower", interval=(1, 30))),
        (reading(19.0, better="lower", paired=True), reading(21.0, better="lower", paired=True)),
        (reading(19.0), replace(reading(21.0), accepted="ann, until 2027: why")),
        (reading(19.0, unit="ms"), reading(21.0)),
        (reading(19.0), reading(float("inf"))),
        (reading(None, witness=0), reading(21.0)),
        (replace(reading(19.0), verdict=Verdict.INSTRUMENT), reading(21.0)),
        (reading(19.0, at_least=1), reading(21.0, at_least=1)),
        (
            reading(19.0, unit="ratio", id="a/b/error_ratio"),
            reading(21.0, unit="ratio", id="a/b/error_ratio"),
        ),
        (
            reading(9.0, better="lower", at_most=None, tolerance=0.1),
            reading(21.0, better="lower", at_most=None, tolerance=0.1),
        ),
    ],
    ids=[
        *("count", "interval", "paired", "accepted", "unit", "infinite", "unmeasured", "instrument"),
        *("two bounds", "error", "no bound"),
    ],
)
def test_other_differences_are_not_read_again(adopted: Judgement, candidate: Judgement) -> None:
    assert outside_on_one_side(Record({}, (adopted,)), Record({}, (candidate,))) == {}


def test_better_reading_follows_the_direction_of_the_row() -> None:
    faster, slower = reading(3.0, at_most=None, at_least=1), reading(2.0, at_most=None, at_least=1)
    assert better_reading(slower, faster).row.value == better_reading(faster, slower).row.value == 3.0
    assert better_reading(reading(3.0), reading(2.0)).row.value == 2.0
    first = reading(21.0)
    for unusable in (reading(None, witness=0), replace(reading(1.0), verdict=Verdict.INFRA)):
        assert better_reading(first, unusable) is first


def test_other_rows_keep_their_first_value(machine: Machine, out: Path) -> None:
    """Rows and faults that only the second run has are added; what the machine disturbed in it is not."""
    readings(machine, (13.0, 13.0), (21.0, 13.0))
    kernels, others = (count(x, id="kernels/a/kernels") for x in (11, 12))
    late = count(1, id="kernels/a/late")
    for side in machine.sides.values():
        side.counts = [*side.counts, replace(kernels, row=replace(kernels.row, test=TEST))]
        more = [replace(j, row=replace(j.row, test=TEST)) for j in (others, late)]
        side.second = [*(side.second or ()), *more]
    gate = machine.gate(out)
    assert (gate.decision, gate.findings) == (Decision.ADOPT, ())
    for name in ("adopted", "candidate"):
        assert stored(out, name, "kernels/a/kernels").row.value == 11
        assert stored(out, name, "kernels/a/late").row.value == 1


def test_failure_in_the_second_run_holds(machine: Machine, out: Path) -> None:
    readings(machine, (13.0, 13.0), (21.0, 13.0))
    machine.sides["candidate"].second_problems = (f"{TEST}: assert 1 == 2",)
    assert labels(machine.gate(out)) == [("HOLD", "PROBLEM")]


def test_skip_in_the_second_run_is_no_problem(machine: Machine, out: Path) -> None:
    """The first run counts it."""
    readings(machine, (13.0, 13.0), (21.0, 13.0))
    machine.sides["candidate"].second_problems = (f"{TEST}: skipped under --gate: later",)
    assert labels(machine.gate(out)) == []


def test_second_run_that_is_cut_short_changes_nothing(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        runs = machine.run_lanes(calls, timeout)
        cut = [call.python.name == "candidate" and TEST in call.selection for call in calls]
        return [
            replace(r, record=replace(r.record, complete=False), failure="died of SIGSEGV")
            if no and r.record
            else r
            for r, no in zip(runs, cut)
        ]

    monkeypatch.setattr(runner, "run_lanes", run)
    readings(machine, (13.0, 12.0), (21.0, 13.0))
    gate = machine.gate(out)
    assert labels(gate) == [("HOLD", "REGRESSION")]
    assert (stored(out, "adopted").row.value, stored(out, "candidate").row.evidence) == (12.0, ("21.0 s",))
    words = f"; candidate: not read, died of SIGSEGV (log: {out / 'bounds-candidate.log'})"
    assert printed(out)[0].endswith(words)


def test_readings_are_taken_on_empty_compile_caches(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides at once on their GPUs; on filled caches a time that includes a compilation would always pass."""
    seen: list[list[LaneCall]] = []

    def run(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        if TEST in calls[0].selection:
            seen.append([*calls])
        return machine.run_lanes(calls, timeout)

    monkeypatch.setattr(runner, "run_lanes", run)
    readings(machine, (13.0, 12.0), (21.0, 13.0))
    machine.gate(out, ON_GPU, shares=divide(["0", "1", "2", "3"], 1, range(8)))
    ((adopted, candidate),) = seen
    assert [call.environment["CUDA_VISIBLE_DEVICES"] for call in (adopted, candidate)] == ["0,1", "2,3"]
    assert adopted.selection == candidate.selection == ["-n", "0", TEST]
    for call in (adopted, candidate):
        cache = call.environment["TORCHINDUCTOR_CACHE_DIR"]
        assert cache not in machine.caches(call.python.name).values()
        assert not Path(cache).exists()
        assert call.environment["BUMPGATE_ROUNDS"] == "15"
    caches = {call.environment["TORCHINDUCTOR_CACHE_DIR"] for call in (adopted, candidate)}
    assert len(caches) == 2


class Killed(BaseException):
    """Simulates a kill: no handler of the gate catches it."""


@pytest.mark.parametrize(
    "config", [GateConfig("cpu", candidate="torch==2.14.0"), ON_GPU], ids=["cpu", "one GPU"]
)
def test_killed_gate_does_not_repeat_the_second_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: GateConfig
) -> None:
    """The sides take turns, and each is saved."""
    for at in (5, 6, 7):
        machine, out = Machine(tmp_path / f"tree{at}"), tmp_path / f"out{at}"
        attach(machine, monkeypatch)
        readings(machine, (19.87, 21.0), (20.46, 13.1))

        def kill(machine: Machine = machine, at: int = at) -> None:
            if len(machine.processes) == at:
                raise Killed

        machine.before_process = kill
        with pytest.raises(Killed):
            machine.gate(out, config)
        assert reruns(machine) == ["adopted", "candidate"][: at - 4]
        machine.before_process = lambda: None
        assert machine.gate(out, config).decision is Decision.ADOPT
        assert reruns(machine) == ["adopted", "candidate"]
        assert [len(stored(out, name).row.evidence) for name in ("adopted", "candidate")] == [2, 2]


def test_third_reading_is_never_taken(machine: Machine, out: Path) -> None:
    """The time is outside of its bound twice, and the gate is killed in its first session."""
    readings(machine, (13.0, 14.0), (26.5, 25.5))

    def kill() -> None:
        if machine.bench and machine.bench.gate.paired:
            raise Killed

    machine.before_process = kill
    with pytest.raises(Killed):
        machine.gate(out)
    raw = json.loads((out / state.NAME).read_text())
    assert [side["read_again"] for side in raw["sides"].values()] == [True, True]
    raw["sessions"] = None  # killed before the sessions were saved
    (out / state.NAME).write_text(json.dumps(raw))
    machine.before_process = lambda: None
    assert labels(machine.gate(out)) == [("HOLD", "REGRESSION")]
    assert reruns(machine) == ["adopted", "candidate"]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.end()


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
def test_real_processes_read_on_an_empty_cache(tree: Tree, tmp_path: Path) -> None:
    tree.tests(FIRST_CALL, "suites/kernels/test_s.py")
    test = "suites/kernels/test_s.py::test_first_call[cpu]"
    rows = load(tmp_path / "baselines/cpu.json", "cpu")
    reviewed = Reviewed(13.0, "s", "derived", test=test)
    save(tmp_path / "baselines/cpu.json", replace(rows, rows={**rows.rows, ROW: reviewed}))
    done = tree.gate("--", "suites/canaries", "suites/kernels")
    assert done.code == 0, done.out + done.err
    assert f"outside of a bound on one side, read once more on both: {ROW}; still outside: none" in done.err
    adopted, candidate = (stored(tmp_path / "g", name).row for name in ("adopted", "candidate"))
    other = "read twice, the better reading counts; the other: "
    assert (adopted.value, adopted.evidence) == (13.1, ("0 entries, worker gw0", f"{other}14.1 s"))
    assert (candidate.value, candidate.evidence) == (14.1, ("0 entries, worker None", f"{other}20.46 s"))


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
def test_time_to_be_read_again_does_not_hold_so_far(tmp_path: Path, again: bool) -> None:
    """A fast gate reports it at once."""
    records = {name: tmp_path / f"{name}.json" for name in ("adopted", "candidate")}
    for name, seconds in (("adopted", 19.87), ("candidate", 20.46)):
        write_record(records[name], {"lane": "cpu"}, [reading(seconds)], complete=False)
    sides = {name: Side(name, None) for name in records}
    interim = Interim("cpu", sides, records, time.monotonic() - 90, print, again)
    held = f"1.5 min: HOLD so far: REGRESSION first_call_cpu_seconds: 20.46 s; {ROW}"
    assert interim.look(progress=True) == (
        ["1.5 min: 1 row compared: none holds so far"] if again else [held]
    )
