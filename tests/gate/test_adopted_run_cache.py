"""The adopted side's run is kept for the next gate of the same tree, set and host, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import accepted
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Verdict, read_record
from bumpgate.gate import adopted_run_cache, measure
from bumpgate.gate.state import Gate
from bumpgate.process.gpu_shares import divide
from bumpgate.process.runner import LaneCall, LaneRun
from bumpgate.process.tree_digest import Binding
from suites.support.planted import planted
from tests.support.gating import TODAY, Machine, count, gone, written

TREE = Binding("1.0", "c0ffee", {"suites/a.py": "1234"})


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))


def run_gate(
    machine: Machine, out: Path, tree: Binding | None = None, *, fresh: bool = False, **options: Any
) -> Gate:
    """Return a gate of two environments that bumpgate built: each has a lock and a filled compile cache.

    options: of its configuration.
    """
    made = machine.prepare(out, fresh=fresh)
    (machine.root / "suites/a.py").write_text('SIZE = os.environ.get("MODEL_SIZE")\n')
    made.gate = replace(made.gate, binding=tree or TREE, config=replace(made.gate.config, **options))
    for name, spec in made.environments.items():
        cache = machine.root.parent / f"cache-{name}"
        if not adopted_run_cache.folder().exists():
            cache.mkdir(exist_ok=True)
        lock = machine.root / f"{name}.pylock.toml"
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        made.environments[name] = replace(spec, lock=lock, variables=variables)
    machine.processes.clear()
    made.run()
    return made.gate


def kept_files(pattern: str = "*.json") -> list[Path]:
    return [*adopted_run_cache.folder().glob(pattern)]


def test_second_gate_takes_the_kept_run(machine: Machine, tmp_path: Path) -> None:
    first = run_gate(machine, tmp_path / "first")
    assert ("all:adopted" in machine.processes, first.sides["adopted"].kept) == (True, "")
    second = run_gate(machine, tmp_path / "second")
    assert machine.processes[:3] == ["suites/canaries:adopted", "suites/canaries:candidate", "all:candidate"]
    assert {"timed:adopted", "timed:candidate"} <= set(machine.processes)
    assert "all:adopted" not in machine.processes
    assert second.decision is Decision.ADOPT
    record = read_record(tmp_path / "first" / "adopted.json")
    started = record.provenance["started"]
    assert second.sides["adopted"].kept == started
    assert f"its run of {started}: same tree" in (tmp_path / "second" / "output.txt").read_text()
    assert written(tmp_path / "second").adopted.record == record


@planted("D6", "the candidate counts another value, next to a kept run of the adopted build")
def test_candidate_is_compared_with_the_kept_run(machine: Machine, tmp_path: Path) -> None:
    run_gate(machine, tmp_path / "first")
    machine.plant("candidate", counts=(count(14),))
    found = run_gate(machine, tmp_path / "second")
    assert ("all:adopted" in machine.processes, found.decision) == (False, Decision.HOLD)


def write_acceptance(machine: Machine, since: date, expires: date) -> None:
    (machine.root / "baselines").mkdir(exist_ok=True)
    (machine.root / "baselines" / accepted.FILE).write_text(
        '[[accepted]]\nlane = "cpu"\nrow = "a/b/c"\nvalue = 3\nowner = "ann"\nreason = "why"\n'
        f"since = {since}\nexpires = {expires}\n"
    )


def another_build_of_one_version(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    commit = {"torch": "another commit"}
    patch.setattr(measure, "installed", lambda *a: replace(machine.installed(*a), git_version=commit))


def fewer_gpus(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    prepare, shares = machine.prepare, divide(["0", "1"], 1, range(8))
    patch.setattr(machine, "prepare", lambda out, **more: prepare(out, shares=shares, **more))


def at_another_time(hours: int) -> Callable[[Machine, pytest.MonkeyPatch], None]:
    def change(machine: Machine, patch: pytest.MonkeyPatch) -> None:
        find, now = adopted_run_cache.find, datetime.now(timezone.utc) + timedelta(hours=hours)
        patch.setattr(adopted_run_cache, "find", lambda name: find(name, now))

    return change


def damaged_file(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    for path in kept_files():
        path.write_text(path.read_text()[:-30])


CHANGES: dict[str, Callable[[Machine, pytest.MonkeyPatch], object]] = {
    "package": lambda m, _: m.plant("adopted", packages={"numpy": "2.5.0"}),
    "build of one version": another_build_of_one_version,
    "host": lambda _, patch: patch.setattr(measure, "host_class", lambda: "EPYC, 16 cores"),
    "day": at_another_time(25),
    "earlier clock": at_another_time(-2),
    "fewer GPUs": fewer_gpus,
    "variable": lambda _, patch: patch.setenv("TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS", "1"),
    "variable of a source": lambda _, patch: patch.setenv("MODEL_SIZE", "3"),
    "bumpgate": lambda _, patch: patch.setattr(f"{__name__}.TREE", replace(TREE, bumpgate="1.1")),
    # One that has expired since the kept run has the same effect: it judged the kept rows.
    "acceptance": lambda m, _: write_acceptance(m, accepted.today(), accepted.today()),
    "lost cache": lambda m, _: (m.root.parent / "cache-adopted").rmdir(),
    "damaged file": damaged_file,
}
OPTIONS: list[dict[str, Any]] = [
    {"tree": replace(TREE, files={"suites/a.py": "5678"})},
    {"fresh": True},
    {
        "command": "python bench.py --size 2"
    },  # its generated test lies in build/, which is no part of the tree
    {"selection": ("-k", "count")},
    {"without": ("fast",)},
]


@pytest.mark.parametrize("change", CHANGES)
def test_kept_run_is_refused_after_a_change(
    change: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_gate(machine, tmp_path / "first")
    CHANGES[change](machine, monkeypatch)
    run_gate(machine, tmp_path / "second")
    assert "all:adopted" in machine.processes


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_kept_run_is_refused_for_other_options(
    machine: Machine, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_gate(machine, tmp_path / "first")
    second = run_gate(machine, tmp_path / "second", **options)
    assert any(step.endswith(":adopted") and "canaries" not in step for step in machine.processes[:4])
    assert not second.sides["adopted"].kept


def test_expired_acceptance_is_no_change(machine: Machine, tmp_path: Path) -> None:
    run_gate(machine, tmp_path / "first")
    write_acceptance(machine, TODAY - timedelta(days=9), TODAY - timedelta(days=1))
    run_gate(machine, tmp_path / "second")
    assert "all:adopted" not in machine.processes


def test_run_of_a_users_interpreter_is_not_kept(machine: Machine, tmp_path: Path) -> None:
    """Its packages can change while their versions stay."""
    made = machine.prepare(tmp_path / "first")
    made.gate = replace(made.gate, binding=TREE)
    made.run()
    assert not kept_files()


INCOMPLETE = {
    "a noisy time": {"counts": (gone(Verdict.INCONCLUSIVE, "noise"),)},
    "a failed test": {"problems": ("suites/a.py::test_x: raised",)},
    "a cut run": {"complete": False},
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_run_without_a_whole_result_is_not_kept(machine: Machine, tmp_path: Path, what: str) -> None:
    machine.plant("adopted", **INCOMPLETE[what])
    run_gate(machine, tmp_path / "first")
    assert not kept_files()


def test_run_with_times_of_another_host_class_is_kept(machine: Machine, tmp_path: Path) -> None:
    """They are inconclusive there in every run, and the sessions judge them."""
    machine.plant("adopted", counts=(replace(gone(Verdict.INCONCLUSIVE, "another host"), explains=True),))
    run_gate(machine, tmp_path / "first")
    assert kept_files()


def test_oldest_kept_runs_are_deleted(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted_run_cache, "MOST", 2)
    for number in range(4):
        run_gate(machine, tmp_path / str(number), replace(TREE, commit=str(number)))
    assert len(kept_files()) == len(kept_files("*.caches")) == 2


def test_candidate_alone_runs_on_its_half_of_the_gpus(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept run was made on the other half. On all GPUs the candidate would be measured on another machine."""
    shares = divide(["0", "1", "2", "3"], 2, range(8))
    prepare, run_lane, seen = machine.prepare, machine.run_lane, []
    monkeypatch.setattr(machine, "prepare", lambda out, **more: prepare(out, shares=shares, **more))

    def run(call: LaneCall, timeout: float | None = None) -> LaneRun:
        seen.append((call.python.name, call.environment.get("CUDA_VISIBLE_DEVICES")))
        return run_lane(call, timeout)

    monkeypatch.setattr(machine, "run_lane", run)
    for out in ("first", "second"):
        seen.clear()
        gate = run_gate(machine, tmp_path / out)
        assert ("all:adopted" in machine.processes) == (out == "first")
        assert ("candidate", "2,3") in seen
        assert ("candidate", "0,1,2,3") not in seen
        assert gate.decision is Decision.ADOPT
