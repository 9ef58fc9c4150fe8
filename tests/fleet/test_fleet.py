"""Bisects and gates on several hosts, without an engine: the same answers, and no reading is lost or repeated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate import cli
from bumpgate.bisect import answer, bisection
from bumpgate.bisect.bisection import MachineError
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.probe import Cause, Reading
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision
from bumpgate.env.request import Request
from bumpgate.fleet import engine, files, gates, inventory, ray_engine
from bumpgate.fleet.engine import Done, Host, Lost, Task, Waiting, features
from bumpgate.fleet.readings import Readings
from tests.support.foreign import LANE, Foreign
from tests.support.git_repository import GitRepository
from tests.support.killing import KillPoints, check_every_kill_point, run_loop
from tests.support.project import wrapped_python
from tests.support.searching import labels, mutant_of

NAMES = tuple(labels(60))


def test_kill_at_every_step_of_a_batch_gives_the_same_answer(tmp_path: Path) -> None:
    assert check_every_kill_point(bisection, tmp_path, hosts=4) > 40


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_any_number_of_hosts_gives_the_answer_of_one(hosts: int, tmp_path: Path) -> None:
    alone = run_loop(tmp_path / "one", KillPoints(), [])
    shared = run_loop(tmp_path / "many", KillPoints(), [], hosts=hosts)
    assert alone[0] is not None
    assert shared[0] is not None
    assert (shared[0].suspects, shared[0].last_old, shared[1]) == (
        alone[0].suspects,
        alone[0].last_old,
        alone[1],
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if load(place) is None]", "]"),
        ("            self._judge(jobs)\n        failed:", "        failed:"),
        (
            "if place == self._next_place(index) else None\n            if reading:",
            "\n            if reading:",
        ),
    ],
    ids=["readings on disk ignored", "readings on disk not recorded", "order of repeats ignored"],
)
def test_mutant_batch_that_loses_readings_is_caught(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_every_kill_point(mutant_of(bisection, old, new), tmp_path, hosts=4)


def stopped(first_bad: int, reads: Sequence[int], misreads: float | None = 0.0) -> str:
    searched = BisectPlan(NAMES, NAMES[0], NAMES[-1], (), misreads, misreads).search()
    for index in reads:
        searched.record(index, ProbeOutcome.BAD if index >= first_bad else ProbeOutcome.GOOD)
    return answer.so_far(searched)


def test_partial_answer_is_the_range_between_the_readings() -> None:
    assert stopped(30, [0]) == ""
    assert stopped(30, [0, 59]) == f"so far      {NAMES[0]} GOOD, {NAMES[59]} BAD; probability 1.00"
    found = f"so far      {NAMES[20]} GOOD, {NAMES[40]} BAD; probability "
    assert stopped(30, [0, 59, 20, 40]) == f"{found}1.00"
    unsure = stopped(30, [0, 59, 20, 40], None)
    assert unsure.startswith(found)
    assert 0.5 < stated(unsure) < stated(stopped(30, [0, 59, 20, 20, 40, 40], None)) < 1


def stated(line: str) -> float:
    return float(line.split()[-1])


class FakeEngine:
    """Runs tasks in this process; `lost` of them, by number, have no result."""

    def __init__(self, *lost: int, slots: int = 2) -> None:
        self.lost = lost
        self.slots = slots
        self.tasks: list[Task] = []

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        return [Host("a", "1", frozenset({"lane_mine", "lane_cpu"}), self.slots)] if self.slots else []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        self.tasks += tasks
        for number, task in reversed([*enumerate(tasks)]):
            lost = number in self.lost
            yield (
                number,
                Lost("its host died")
                if lost
                else engine.finished(engine.attempt(task.function, task.arguments)),
            )

    def close(self) -> None:
        pass


def test_candidate_is_skipped_only_while_hosts_are_left(tmp_path: Path) -> None:
    request = Request(("night===1.1",), name="night 1.1")
    jobs = [(tmp_path / name, request) for name in ("1.1.0", "1.2.0")]

    def take(slots: int) -> list[Reading]:
        options: Any = None
        return [*Readings(FakeEngine(0, 1, slots=slots), options, (), 4, tmp_path, "1.0").take(jobs)]

    with pytest.raises(MachineError, match="its host died"):
        take(slots=0)
    assert not [*tmp_path.rglob("reading.json")]
    assert [reading.cause for reading in take(slots=2)] == [Cause.MACHINE] * 2


class FakeRay:
    """Ends one task per wait, after a wait without any; references are numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waits = 0
        place = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda host, soft: (host, soft))
        self.util = SimpleNamespace(scheduling_strategies=place)

    def remote(self, function: Any) -> Any:
        def start(*call: Any) -> int:
            self.calls.append(call)
            return len(self.calls) - 1

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeManagerHostname": "a", "NodeID": "1", "Resources": {"CPU": 1.0}}]

    def wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        self.waits += 1
        return (refs[:1], refs[1:]) if self.waits > 1 else ([], refs)

    def get(self, ref: int) -> Any:
        function, arguments = self.calls[ref]
        return engine.attempt(function, arguments)


def test_ray_yields_every_task_in_the_order_of_ending() -> None:
    cluster = object.__new__(ray_engine._Cluster)
    cluster._ray, cluster._patience, cluster._abandoned = FakeRay(), 60.0, lambda: False
    tasks = [Task(len, ("x" * n,)) for n in range(3)]
    found = [*cluster.run(tasks)]
    assert [(number, result.value) for number, result in found if isinstance(result, Done)] == [
        (0, 0), (1, 1), (2, 2),
    ]  # fmt: skip


def test_refusal_and_crash_of_a_call_differ() -> None:
    def refuse() -> None:
        raise BumpgateError("no such test\nat all")

    refused = engine.finished(engine.attempt(refuse, ()))
    assert isinstance(refused, Lost)
    assert (refused.refused, refused.why.partition(": ")[2]) == (True, "no such test at all")
    with pytest.raises(ZeroDivisionError):
        engine.attempt(lambda: 1 // 0, ())
    assert isinstance(engine.finished(engine.attempt(len, ("ab",))), Done)


def test_features_are_one_word_each() -> None:
    assert features("h200", "EPYC 9654, 16") == ("lane_h200", "class_EPYC_9654__16")
    assert features("") == ()


def test_task_waits_for_a_host_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    fake = FakeEngine(slots=0)
    waiting, task = Waiting(fake.hosts, patience=10), Task(len, needs=("lane_mine",))
    assert waiting.in_vain(task) == ""
    now[0] = 9
    assert waiting.in_vain(task) == ""
    fake.slots = 1  # it restarts
    assert waiting.in_vain(task) == ""
    fake.slots, now[0] = 0, 15
    assert waiting.in_vain(task) == ""
    now[0] = 25
    assert waiting.in_vain(task) == "no host is left for lane_mine"


def test_files_of_a_host_arrive_without_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    for name in ("reading.json", "logs/test.log", "caches/inductor/x", "a/caches/y"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(f"begin {name} end")
    monkeypatch.setattr(files, "LONGEST", 8)
    found = files.pack(made)
    assert found == {"logs/test.log": b".log end", "reading.json": b"begin reading.json end"}
    order: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: order.append(to.name) or replace(self, to))
    files.unpack(found, tmp_path / "there", "reading.json")
    assert order == ["test.log", "reading.json"], "the file that counts comes last"
    assert (tmp_path / "there/logs/test.log").read_text() == ".log end"
    assert len([*(tmp_path / "there").rglob("*")]) == 3


def test_folder_on_host_outlives_a_failed_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))

    def cut() -> None:
        with files.folder_on_host("gates", "x") as place:
            (place / "kept").touch()
            raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        cut()
    with files.folder_on_host("gates", "x") as place:
        assert (place / "kept").exists()
    assert not place.exists()


FACTS = {"commit": "aaa", "driver": "580"}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"a": FACTS, "b": FACTS}, []),
        (
            {"a": FACTS, "b": FACTS | {"driver": "570"}, "c": FACTS},
            ["b: driver is 570; 580 on the 2 others"],
        ),
        (
            {"a": FACTS, "b": FACTS, "c": {"commit": "aaa"}},
            ["c: driver is none; 580 on the 2 others"],
        ),
        ({"a": FACTS, "b": FACTS | {"commit": "bbb"}}, ["commit: aaa on a; bbb on b"]),
    ],
    ids=["equal", "one differs", "one lacks it", "no majority"],
)
def test_differences_name_the_host(found: dict[str, dict[str, str]], lines: list[str]) -> None:
    assert [*inventory.differences(found)] == lines


def test_inventory_has_no_value_of_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX", "https://user:secret@example.org")
    (tmp_path / "a.py").write_text("1")
    found = inventory.take(tmp_path)
    assert "UV_INDEX" in found["settings"]
    assert "secret" not in str(found)
    assert found["package pytest"] == pytest.__version__
    (tmp_path / "a.py").write_text("2")
    assert inventory.take(tmp_path)["source tree"] != found["source tree"]
    assert inventory.take(tmp_path / "absent")["source tree"].endswith("absent does not exist")


def test_inventory_has_the_version_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "pytest-99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest\nVersion: 99\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert inventory.take(tmp_path / "absent")["package pytest"] == "99"


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """A repository with two lanes and an interpreter per side, whose torch imports at once."""
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", LANE + LANE.replace("mine", "other"))
    made.write("torch.py", "")
    for side in ("good", "bad"):
        made.write(f".{side}/python", wrapped_python(SIDE=side))
        (tmp_path / f".{side}/python").chmod(0o755)
    row = '{"name": "graphs", "value": 3, "unit": "graphs", "better": "exact"}'
    made.write("bench.py", f"print('{row}')")
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / ".home"))
    monkeypatch.chdir(tmp_path)
    return made


PYTHONS = (
    "--python-adopted",
    ".good/python",
    "--python-candidate",
    ".bad/python",
    "--command",
    "python bench.py",
)


def test_gate_of_each_lane_comes_back_with_its_files(foreign: Foreign) -> None:
    out = foreign.root / "out"
    fake = FakeEngine(1)
    lost, done = gates.run(fake, ["mine", "other"], "", PYTHONS, out)
    assert (lost.lane, lost.gate, lost.why) == ("other", None, "its host died")
    assert done.gate is not None, (out / "mine/fleet.log").read_text()
    assert (done.lane, done.gate.lane, done.gate.decision.name) == ("mine", "mine", "ADOPT")
    assert [task.needs for task in fake.tasks] == [("lane_mine",), ("lane_other",)]
    assert {"gate.json", gates.LOG, "adopted.json"} <= {path.name for path in (out / "mine").iterdir()}
    assert gates.read(out / "other") is None
    assert gates.differences(done.gate, "mine", PYTHONS, out) == ""
    for lane, arguments in (("other", PYTHONS), ("mine", PYTHONS[2:]), ("mine", (*PYTHONS, "--", "-q"))):
        assert "its command is" in gates.differences(done.gate, lane, arguments, out)
    foreign.write("bench.py", "print(1)")
    assert gates.differences(done.gate, "mine", PYTHONS, out) == "the source tree has changed since"
    assert not [*(foreign.root / ".home/fleet/gates").iterdir()]


@pytest.mark.parametrize(("code", "kept"), [(1, Decision.ADOPT), (0, Decision.HOLD), (0, None)])
def test_gate_that_ends_with_another_code_has_no_verdict(
    code: int, kept: Decision | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated task that fails leaves the gate.json that it began with."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    monkeypatch.setattr(gates, "read", lambda folder: kept and SimpleNamespace(decision=kept))
    monkeypatch.setattr(gates, "run_child", lambda *a: (code, a[-1].write_text("MemoryError")))
    with pytest.raises(OSError, match=f"the gate ended with {code}: MemoryError"):
        gates.measure("mine", (), tmp_path, "name")


def test_gate_with_bad_input_is_refused_on_every_host(foreign: Foreign) -> None:
    (result,) = gates.run(
        FakeEngine(), ["mine"], "", ("--python-candidate", sys.executable), foreign.root / "out"
    )
    assert (result.gate, result.bad_input) == (None, True)
    assert "pyproject.toml has no extra 'mine'" in result.why


def fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["bumpgate", "fleet", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err


ENDS = ("bisect", "--good", "1.0", "--bad", "2.0", "--command", "true")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (ENDS, "name one engine: --ray HOST:PORT, or --slurm FOLDER"),
        (("--ray", "a:1", "--slurm", "jobs", "check"), "name one engine"),
        (("--ray", "a:1", *ENDS, "--interactive"), "--interactive is for one host"),
        (("--ray", "a:1", *ENDS, "--builder", "x", "--repository", "."), "--builder is for one host"),
        (("--ray", "a:1", *ENDS), "--ray needs ray; install it with: pip install 'bumpgate[fleet]'"),
        (("--slurm", "jobs", "check"), "--slurm needs submitit; install it with: pip install"),
    ],
    ids=["no engine", "two engines", "interactive", "builder", "no ray", "no submitit"],
)
def test_bad_fleet_input_is_one_line(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    GitRepository(tmp_path).commit("one", {"a": "1"})
    for name in ("ray", "submitit"):  # as where the extra is not installed
        monkeypatch.setitem(sys.modules, name, None)
    code, err = fleet(monkeypatch, capsys, *arguments)
    assert (code, len(err.splitlines())) == (4, 1), err
    assert words in err
