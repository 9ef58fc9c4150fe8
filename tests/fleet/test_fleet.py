"""Gates and bisects on several hosts, without a cluster: their results come back, and a lost task is no verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate import fleet
from bumpgate.core.errors import BumpgateError
from bumpgate.core.gate_file import GateFileError
from bumpgate.fleet import Done, Lost, Task
from tests.fleet.lanes import PYTHONS, two_lanes
from tests.support.project import Result, in_process


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
    tasks = [Task(len, ("x" * n,), "a-1") for n in range(3)]
    found = [*fleet._run(FakeRay([True] * 3), tasks, 60.0)]
    assert [(number, result.value) for number, result in found] == [(0, 0), (1, 1), (2, 2)]


def test_task_waits_for_a_host_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that restarts within the time takes the task."""
    now = iter([0.0, 0.0, 9.0, 9.0, 15.0, 15.0, 25.0, 25.0])
    monkeypatch.setattr(fleet.time, "monotonic", lambda: next(now))
    ray = FakeRay([False, False, True, False, False])
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    ((number, result),) = fleet._run(ray, [Task(len, (), "a-1")], 10.0)
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
    for name in ("gate.json", "logs/test.log", "caches/inductor/x", "a/caches/y"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(f"begin {name} end")
    monkeypatch.setattr(fleet, "LONGEST", 8)
    found = fleet.pack(made)
    assert found == {"logs/test.log": b".log end", "gate.json": b"begin gate.json end"}
    order: list[str] = []
    write = fleet.write_atomic
    monkeypatch.setattr(
        fleet, "write_atomic", lambda path, text: order.append(path.name) or write(path, text)
    )
    fleet.unpack(found, tmp_path / "there", "gate.json")
    assert order == ["test.log", "gate.json"], "the file that counts comes last"
    assert (tmp_path / "there/logs/test.log").read_text() == ".log end"
    assert len([*(tmp_path / "there").rglob("*")]) == 3


Run = Callable[..., Result]


def in_this_process(tasks: Sequence[Task], *lost: int) -> Iterator[tuple[int, Done | Lost]]:
    """Run tasks here; `lost` of them, by number, have no result."""
    for number, task in reversed([*enumerate(tasks)]):
        found = Lost("its host died") if number in lost else fleet.on_worker(task.function, task.arguments)
        yield number, found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `bumpgate fleet` with a cluster's results, in the folder of the test."""

    def run(results: Callable[[Sequence[Task]], Any], *arguments: str) -> Result:
        monkeypatch.setattr(fleet, "run_tasks", lambda address, tasks: results(tasks))
        return in_process(tmp_path, "fleet", "--ray", "a:1", *arguments)

    return run


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two lanes and an interpreter per side, whose torch imports at once."""
    for name, value in (two_lanes(tmp_path).env | {"BUMPGATE_HOME": str(tmp_path / ".home")}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_gate_of_each_lane_comes_back_with_its_files(tree: Path, run: Run) -> None:
    out = tree / "out"
    gates = ("gate", "--lane", "mine", "--lane", "other", "--out", "out", "--", *PYTHONS)
    ran = run(lambda tasks: in_this_process(tasks, 1), *gates)
    assert ran.code == 125, ran
    lost, measured = ran.out.splitlines()
    assert lost == "UNKNOWN  other: no result: its host died"
    assert measured.startswith("ADOPT    mine on ")
    assert {"gate.json", fleet.LOG} <= {path.name for path in (out / "mine").iterdir()}
    assert len([*(out / "mine").glob("*.json")]) >= 3, "the records of both sides"
    assert not [*(tree / ".home/fleet/gate").iterdir()]
    again = run(in_this_process, *gates)
    assert (again.code, again.err.count("\n")) == (4, 1)
    assert "out holds gates of mine: leave these out, or name another --out" in again.err


def test_gate_with_bad_input_is_refused_on_every_host(tree: Path, run: Run) -> None:
    gate = ("gate", "--lane", "mine", "--out", "out", "--", "--python-candidate", sys.executable)
    ran = run(in_this_process, *gate)
    assert ran.code == 4
    assert "no result: " in ran.out
    assert "pyproject.toml has no extra 'mine'" in ran.out


@pytest.mark.parametrize(("command", "kept"), [("gate", (0, "")), ("gate", None), ("bisect", (125, ""))])
def test_command_that_ends_with_another_code_has_no_result(
    command: str, kept: tuple[int, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated task that fails leaves the result that it began with, and its folder, in which a repeat continues."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    monkeypatch.setattr(fleet, "read_result", lambda command, folder: kept)
    lines = []

    def child(line: list[str], *a: Any) -> tuple[int, float]:
        lines.append(line)
        a[-1].with_name("gate.json").touch()
        return 1, a[-1].write_text("MemoryError")

    monkeypatch.setattr(fleet, "run_child", child)
    for _ in range(2):
        with pytest.raises(OSError, match=f"the {command} ended with 1: MemoryError"):
            fleet.run_on_host(command, "mine", ("--good", "1", "--", "suites"), tmp_path, "name")
    assert lines[1][3:8] == [command, "--lane", "mine", "--good", "1"]
    assert lines[1][-3:] == ["--resume", "--", "suites"]
    with suppress(OSError):
        fleet.run_on_host("bisect", "mine", ("--command=true",), tmp_path, "name")
    assert lines[2][3:5] == ["bisect", "--command=true"], "a command needs no lane's set"


def answer(**changes: Any) -> dict[str, Any]:
    return {"package": "torch", "suspects": ["2.6.0", "2.7.0"], "failure": "", "sure": True} | changes


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (answer(), (0, "first bad torch 2.6.0 or 2.7.0")),
        (answer(sure=False), (125, "first bad torch 2.6.0 or 2.7.0")),
        (answer(suspects=[], sure=False, failure="noisy"), (125, "noisy")),
    ],
)
def test_answer_of_a_bisect_is_one_line(raw: Any, expected: tuple[int, str], tmp_path: Path) -> None:
    assert fleet.read_result("bisect", tmp_path) is None
    (tmp_path / "bisect.json").write_text(json.dumps(raw))
    assert fleet.read_result("bisect", tmp_path) == expected


ADOPT, HOLD, UNSURE = (Done("node", (code, "an answer")) for code in (0, 1, 125))
EDITED = Done("node", GateFileError("its evidence gives HOLD"))
LOST, REFUSED = Lost("its host died"), Lost("no such lane", refused=True)


@pytest.mark.parametrize(
    ("command", "results", "code", "words"),
    [
        ("gate", [ADOPT], 0, "ADOPT"),
        ("gate", [ADOPT, HOLD], 1, "ADOPT HOLD"),
        ("gate", [ADOPT, LOST], 125, "ADOPT UNKNOWN"),
        ("gate", [LOST, HOLD, ADOPT], 1, "UNKNOWN HOLD ADOPT"),
        ("gate", [REFUSED, LOST, HOLD], 4, "UNKNOWN UNKNOWN HOLD"),
        ("bisect", [ADOPT, UNSURE], 125, "FOUND UNKNOWN"),
        ("bisect", [ADOPT, REFUSED], 4, "FOUND UNKNOWN"),
        ("gate", [EDITED, ADOPT], 125, "UNKNOWN ADOPT"),
    ],
)
def test_worst_lane_decides_the_exit_code(
    command: str, results: list[Done | Lost], code: int, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}
    monkeypatch.setattr(fleet, "unpack", lambda found, folder, last: kept.update({folder.name: found}))

    def read_result(command: str, folder: Path) -> Any:
        if isinstance(found := kept.get(folder.name), GateFileError):
            raise found
        return found

    monkeypatch.setattr(fleet, "read_result", read_result)
    lanes = [part for number in range(len(results)) for part in ("--lane", f"lane{number}")]
    ran = run(lambda tasks: enumerate(results), command, *lanes, "--", "--candidate", "torch==2")
    assert (ran.code, " ".join(line.split()[0] for line in ran.out.splitlines())) == (code, words)


GATE = ("--ray", "a:1", "gate", "--lane", "h200", "--", "--candidate", "torch==2.14.0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (GATE[2:], "--ray"),
        (GATE, "--ray needs ray; install it with: pip install 'bumpgate[fleet]'"),
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
