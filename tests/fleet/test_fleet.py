"""Bisects and gates on several hosts, without a cluster: the same answers, and no reading is lost or repeated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate import fleet
from bumpgate.bisect import bisection
from bumpgate.bisect.bisection import MachineError
from bumpgate.bisect.options import Options
from bumpgate.bisect.probe import Cause, Reading
from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFileError
from bumpgate.env.request import Request
from bumpgate.fleet import Done, Lost, Readings, Task
from tests.fleet.lanes import PYTHONS, two_lanes
from tests.support.killing import KillPoints, check_every_kill_point, run_loop
from tests.support.project import Result, in_process


def test_kill_at_every_step_of_a_batch_gives_the_same_answer(tmp_path: Path) -> None:
    assert check_every_kill_point(bisection, tmp_path, hosts=4) > 40


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_any_number_of_hosts_gives_the_answer_of_one(hosts: int, tmp_path: Path) -> None:
    alone, blamed = run_loop(tmp_path / "one", KillPoints(), [])
    shared, also = run_loop(tmp_path / "many", KillPoints(), [], hosts=hosts)
    assert (shared.suspects, shared.last_old, also) == (alone.suspects, alone.last_old, blamed)


class FakeCluster:
    """Runs tasks in this process; `lost` of them, by number, have no result."""

    def __init__(self, *lost: int, slots: int = 2) -> None:
        self.lost = lost
        self.places = slots
        self.tasks: list[Task] = []

    def slots(self, lane: str) -> int:
        return self.places

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        self.tasks += tasks
        for number, task in reversed([*enumerate(tasks)]):
            lost = number in self.lost
            yield number, Lost("its host died") if lost else fleet.on_worker(task.function, task.arguments)

    def close(self) -> None:
        pass


def test_candidate_is_skipped_only_while_hosts_are_left(tmp_path: Path) -> None:
    request = Request(("night===1.1",), name="night 1.1")
    jobs = [(tmp_path / name, request) for name in ("1.1.0", "1.2.0")]

    def take(slots: int) -> list[Reading]:
        cluster: Any = FakeCluster(0, 1, slots=slots)
        return [*Readings(cluster, Options(), 4, tmp_path, "1.0").take(jobs)]

    with pytest.raises(MachineError, match="its host died"):
        take(slots=0)
    assert not [*tmp_path.rglob("reading.json")]
    assert [reading.cause for reading in take(slots=2)] == [Cause.MACHINE] * 2


class FakeRay:
    """Ends one task per wait, after a wait without any; references are numbers. alive: whether its node is."""

    def __init__(self, alive: Sequence[bool] = (True,)) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waits = 0
        self.alive = iter(alive)
        self.cancelled: list[int] = []

    def remote(self, function: Any) -> Any:
        def start(*call: Any) -> int:
            self.calls.append(call)
            return len(self.calls) - 1

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": next(self.alive), "Resources": {"CPU": 1.0, "lane_a_1": 1.0}}]

    def wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        self.waits += 1
        return (refs[:1], refs[1:]) if self.waits > 1 else ([], refs)

    def get(self, ref: int) -> Any:
        function, arguments = self.calls[ref]
        return fleet.on_worker(function, arguments)

    def cancel(self, ref: int, force: bool) -> None:
        self.cancelled.append(ref)


def test_every_task_is_yielded_in_the_order_of_ending() -> None:
    tasks = [Task(len, ("x" * n,)) for n in range(3)]
    found = [*fleet._run(FakeRay([True] * 3), tasks, 60.0, lambda: False)]
    assert [(number, result.value) for number, result in found] == [(0, 0), (1, 1), (2, 2)]


def test_task_waits_for_a_host_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that restarts within the time takes the task."""
    now = iter([0.0, 0.0, 9.0, 9.0, 15.0, 15.0, 25.0, 25.0])
    monkeypatch.setattr(fleet.time, "monotonic", lambda: next(now))
    ray = FakeRay([False, False, True, False, False])
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    ((number, result),) = fleet._run(ray, [Task(len, lane="a-1")], 10.0, lambda: False)
    assert (number, result, ray.cancelled) == (0, Lost("no host is left for lane_a_1"), [0])
    assert next(now, None) is None


def test_refusal_and_crash_of_a_call_differ() -> None:
    def refuse() -> None:
        raise BumpgateError("no such test\nat all")

    refused = fleet.on_worker(refuse, ())
    assert isinstance(refused, Lost)
    assert (refused.refused, refused.why.partition(": ")[2]) == (True, "no such test at all")
    with pytest.raises(ZeroDivisionError):
        fleet.on_worker(lambda: 1 // 0, ())
    assert isinstance(fleet.on_worker(len, ("ab",)), Done)


def test_files_of_a_host_arrive_without_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    for name in ("reading.json", "logs/test.log", "caches/inductor/x", "a/caches/y"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(f"begin {name} end")
    monkeypatch.setattr(fleet, "LONGEST", 8)
    found = fleet.pack(made)
    assert found == {"logs/test.log": b".log end", "reading.json": b"begin reading.json end"}
    order: list[str] = []
    write = fleet.write_atomic
    monkeypatch.setattr(
        fleet, "write_atomic", lambda path, text: order.append(path.name) or write(path, text)
    )
    fleet.unpack(found, tmp_path / "there", "reading.json")
    assert order == ["test.log", "reading.json"], "the file that counts comes last"
    assert (tmp_path / "there/logs/test.log").read_text() == ".log end"
    assert len([*(tmp_path / "there").rglob("*")]) == 3


def test_folder_on_host_outlives_a_failed_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    with suppress(OSError), fleet.folder_on_host("gates", "x") as place:
        (place / "kept").touch()
        raise OSError("cut")
    with fleet.folder_on_host("gates", "x") as place:
        assert (place / "kept").exists()
    assert not place.exists()


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `bumpgate fleet` on a cluster, in the folder of the test."""

    def run(cluster: Any, *arguments: str) -> Result:
        monkeypatch.setattr(fleet, "Cluster", lambda address: cluster)
        return in_process(tmp_path, "fleet", "--ray", "a:1", *arguments)

    return run


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two lanes and an interpreter per side, whose torch imports at once."""
    for name, value in (two_lanes(tmp_path).env | {"BUMPGATE_HOME": str(tmp_path / ".home")}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_gate_of_each_lane_comes_back_with_its_files(tree: Path, run: Run) -> None:
    cluster, out = FakeCluster(1), tree / "out"
    gates = ("gate", "--lane", "mine", "--lane", "other", "--out", "out", "--", *PYTHONS)
    ran = run(cluster, *gates)
    assert ran.code == 125, (out / "mine/fleet.log").read_text()
    lost, equal = ran.out.splitlines()
    assert lost == "UNKNOWN  other: no verdict: its host died"
    assert equal.startswith("UNKNOWN  mine on "), "its two sides are equal"
    assert [task.lane for task in cluster.tasks] == ["mine", "other"]
    assert {"gate.json", fleet.LOG} <= {path.name for path in (out / "mine").iterdir()}
    assert len([*(out / "mine").glob("*.json")]) >= 3, "the records of both sides"
    assert not [*(tree / ".home/fleet/gates").iterdir()]
    again = run(cluster, *gates)
    assert (again.code, again.err.count("\n")) == (4, 1)
    assert "out holds gates of mine: leave these out, or name another --out" in again.err


def test_gate_with_bad_input_is_refused_on_every_host(tree: Path, run: Run) -> None:
    ran = run(
        FakeCluster(), "gate", "--lane", "mine", "--out", "out", "--", "--python-candidate", sys.executable
    )
    assert ran.code == 4
    assert "no verdict: " in ran.out
    assert "pyproject.toml has no extra 'mine'" in ran.out


@pytest.mark.parametrize(("code", "kept"), [(1, Decision.ADOPT), (0, Decision.HOLD), (0, None)])
def test_gate_that_ends_with_another_code_has_no_verdict(
    code: int, kept: Decision | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated task that fails leaves the gate.json that it began with."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    monkeypatch.setattr(fleet, "read_gate", lambda folder: kept and SimpleNamespace(decision=kept))
    monkeypatch.setattr(fleet, "run_child", lambda *a: (code, a[-1].write_text("MemoryError")))
    with pytest.raises(OSError, match=f"the gate ended with {code}: MemoryError"):
        fleet.measure_on_host("mine", (), tmp_path, "name")


ADOPT, HOLD = (
    Done("node", SimpleNamespace(decision=d, findings=(), wall_seconds=60.0))
    for d in (Decision.ADOPT, Decision.HOLD)
)
EDITED = Done("node", GateFileError("its evidence gives HOLD"))
LOST, REFUSED = Lost("its host died"), Lost("no such lane", refused=True)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([ADOPT], 0),
        ([ADOPT, HOLD], 1),
        ([ADOPT, LOST], 125),
        ([LOST, HOLD, ADOPT], 1),
        ([REFUSED, LOST, HOLD], 4),
        ([EDITED, ADOPT], 125),
    ],
    ids=["adopt", "hold", "unknown", "hold before unknown", "bad input before all", "edited"],
)
def test_worst_lane_decides_the_exit_code_of_gates(
    results: list[Done | Lost], code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: dict[str, Any] = {}

    def read_gate(folder: Path) -> Any:
        if isinstance(found := gates.get(folder.name), GateFileError):
            raise found
        return found

    monkeypatch.setattr(fleet, "unpack", lambda gate, folder, last: gates.update({folder.name: gate}))
    monkeypatch.setattr(fleet, "read_gate", read_gate)
    cluster = SimpleNamespace(run=lambda tasks: enumerate(results), close=lambda: None)
    lanes = [part for number in range(len(results)) for part in ("--lane", f"lane{number}")]
    ran = run(cluster, "gate", *lanes, "--", "--candidate", "torch==2")
    words = [result.value.decision.name if result in (ADOPT, HOLD) else "UNKNOWN" for result in results]
    assert (ran.code, [line.split()[0] for line in ran.out.splitlines()]) == (code, words)


ENDS = ("--ray", "a:1", "bisect", "--good", "1.0", "--bad", "2.0", "--command", "true")
GATE = ("--ray", "a:1", "gate", "--lane", "h200", "--", "--candidate", "torch==2.14.0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (ENDS[2:], "--ray"),
        ((*ENDS, "--environments", "envs"), "--environments is for one host"),
        (ENDS, "--ray needs ray; install it with: pip install 'bumpgate[fleet]'"),
        ((*GATE, "--lane", "cpu"), "--lane after --: the fleet sets it for each gate"),
        ((*GATE, "--lane=cpu"), "--lane=cpu after --: the fleet sets it"),
        ((*GATE, "--out", "elsewhere"), "--out after --: the fleet sets it for each gate"),
    ],
)
def test_bad_fleet_input_is_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where the extra is not installed
    ran = in_process(tmp_path, "fleet", *arguments)
    assert (ran.code, ran.err.count("\n")) == (4, 1), ran
    assert words in ran.err
