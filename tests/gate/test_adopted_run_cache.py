"""The adopted side's run is kept for the next gate of the same tree, set and host, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import accepted, gate_file
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Verdict, read_record
from bumpgate.gate import adopted_run_cache, measure, state
from bumpgate.process.gpu_shares import divide
from bumpgate.process.runner import LaneCall, LaneRun
from bumpgate.process.tree_digest import Binding
from suites.support.planted import planted
from tests.support.gating import TODAY, Machine, PreparedGate, count, gone

TREE = Binding("1.0", "c0ffee", {"suites/a.py": "1234"})


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))


def run_gate(
    machine: Machine, out: Path, tree: Binding | None = None, *, fresh: bool = False, **options: Any
) -> PreparedGate:
    """Return a gate of two environments that bumpgate built: each has a lock and a filled compile cache.

    options: of its configuration.
    """
    made = machine.prepare(out, fresh=fresh)
    (machine.root / "suites/a.py").write_text('SIZE = os.environ.get("MODEL_SIZE")\n')
    config = replace(made.gate.config, **options)
    made.gate = replace(made.gate, binding=tree or TREE, config=config)
    for name, spec in made.environments.items():
        cache = machine.root.parent / f"cache-{name}"
        if not adopted_run_cache.folder().exists():
            cache.mkdir(exist_ok=True)
        lock = machine.root / f"{name}.pylock.toml"
        made.environments[name] = replace(spec, lock=lock, variables={"TORCHINDUCTOR_CACHE_DIR": str(cache)})  # type: ignore[index]
    machine.processes.clear()
    made.run()
    return made


def measured_again(machine: Machine) -> bool:
    return "all:adopted" in machine.processes


def test_second_gate_takes_the_kept_run(machine: Machine, tmp_path: Path) -> None:
    first = run_gate(machine, tmp_path / "first")
    assert measured_again(machine)
    assert first.gate.sides["adopted"].kept == ""
    second = run_gate(machine, tmp_path / "second")
    assert not measured_again(machine)
    assert machine.processes[:3] == ["suites/canaries:adopted", "suites/canaries:candidate", "all:candidate"]
    assert {"timed:adopted", "timed:candidate"} <= set(machine.processes)
    assert second.gate.decision is Decision.ADOPT
    started = read_record(tmp_path / "first" / "adopted.json").provenance["started"]
    assert second.gate.sides["adopted"].kept == started
    assert f"its run of {started}: same tree" in (tmp_path / "second" / "output.txt").read_text()
    found = gate_file.read(tmp_path / "second" / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    assert found.adopted.record == read_record(tmp_path / "first" / "adopted.json")


@planted("D6", "the candidate counts another value, next to a kept run of the adopted build")
def test_candidate_is_compared_with_the_kept_run(machine: Machine, tmp_path: Path) -> None:
    machine.sides["adopted"].counts = machine.sides["candidate"].counts = (count(13),)
    run_gate(machine, tmp_path / "first")
    machine.sides["candidate"].counts = (count(14),)
    found = run_gate(machine, tmp_path / "second").gate
    assert not measured_again(machine)
    assert found.decision is Decision.HOLD


def another_package(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.sides["adopted"].packages = {"numpy": "2.5.0"}


def another_build_of_one_version(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = {"torch": "another commit"}
    monkeypatch.setattr(measure, "installed", lambda *a: replace(machine.installed(*a), git_version=commit))


def another_host(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "host_class", lambda: "EPYC, 16 cores")


def another_day(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    find, later = adopted_run_cache.find, datetime.now(timezone.utc) + timedelta(hours=25)
    monkeypatch.setattr(adopted_run_cache, "find", lambda name: find(name, later))


def an_earlier_clock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    find, earlier = adopted_run_cache.find, datetime.now(timezone.utc) - timedelta(hours=2)
    monkeypatch.setattr(adopted_run_cache, "find", lambda name: find(name, earlier))


def fewer_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, shares = machine.prepare, divide(["0", "1"], 1, range(8))
    monkeypatch.setattr(machine, "prepare", lambda out, **more: prepare(out, shares=shares, **more))


def another_variable(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS", "1")


def another_variable_of_a_source(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_SIZE", "3")


def another_acceptance(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the acceptances. One that has expired since the kept run has the same effect: it judged the kept rows."""
    day = accepted.today()
    (machine.root / "baselines").mkdir(exist_ok=True)
    (machine.root / "baselines" / accepted.FILE).write_text(
        '[[accepted]]\nlane = "cpu"\nrow = "a/b/c"\nvalue = 3\nowner = "ann"\nreason = "why"\n'
        f"since = {day}\nexpires = {day}\n"
    )


def another_bumpgate(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TREE", replace(TREE, bumpgate="1.1"))


def lost_cache(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.root.parent / "cache-adopted").rmdir()


def damaged_file(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in adopted_run_cache.folder().glob("*.json"):
        path.write_text(path.read_text()[:-30])


CHANGES = (
    another_package,
    another_build_of_one_version,
    another_host,
    another_day,
    an_earlier_clock,
    fewer_gpus,
    another_variable,
    another_variable_of_a_source,
    another_bumpgate,
    another_acceptance,
    lost_cache,
    damaged_file,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_kept_run_is_refused_after_a_change(
    change: Callable[[Machine, pytest.MonkeyPatch], None],
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_gate(machine, tmp_path / "first")
    change(machine, monkeypatch)
    run_gate(machine, tmp_path / "second")
    assert measured_again(machine)


def test_kept_run_is_refused_for_another_tree_and_by_fresh(machine: Machine, tmp_path: Path) -> None:
    run_gate(machine, tmp_path / "first")
    run_gate(machine, tmp_path / "second", replace(TREE, files={"suites/a.py": "5678"}))
    assert measured_again(machine)
    run_gate(machine, tmp_path / "third", fresh=True)
    assert measured_again(machine)


@pytest.mark.parametrize(
    "options",
    [
        {
            "command": "python bench.py --size 2"
        },  # its generated test lies in build/, which is no part of the tree
        {"selection": ("-k", "count")},
        {"without": ("fast",)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_kept_run_is_refused_for_other_options(
    machine: Machine, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_gate(machine, tmp_path / "first")
    run_gate(machine, tmp_path / "second", **options)
    assert any(step.endswith(":adopted") and "canaries" not in step for step in machine.processes[:4])
    assert machine.bench
    assert not machine.bench.gate.sides["adopted"].kept


def test_expired_acceptance_is_no_change(machine: Machine, tmp_path: Path) -> None:
    run_gate(machine, tmp_path / "first")
    (machine.root / "baselines").mkdir(exist_ok=True)
    days = TODAY - timedelta(days=9), TODAY - timedelta(days=1)
    (machine.root / "baselines" / accepted.FILE).write_text(
        '[[accepted]]\nlane = "cpu"\nrow = "a/b/c"\nvalue = 3\nowner = "ann"\nreason = "why"\n'
        f"since = {days[0]}\nexpires = {days[1]}\n"
    )
    run_gate(machine, tmp_path / "second")
    assert not measured_again(machine)


def test_run_of_a_users_interpreter_is_not_kept(machine: Machine, tmp_path: Path) -> None:
    """Its packages can change while their versions stay."""
    for out in ("first", "second"):
        machine.processes.clear()
        made = machine.prepare(tmp_path / out)
        made.gate = replace(made.gate, binding=TREE)
        made.run()
        assert measured_again(machine)


@pytest.mark.parametrize("what", ["a noisy time", "a failed test", "a cut run"])
def test_run_without_a_whole_result_is_not_kept(machine: Machine, tmp_path: Path, what: str) -> None:
    side = machine.sides["adopted"]
    if what == "a noisy time":
        side.counts = (gone(Verdict.INCONCLUSIVE, "noise"),)
    side.problems = ("suites/a.py::test_x: raised",) if what == "a failed test" else ()
    side.complete = what != "a cut run"
    run_gate(machine, tmp_path / "first")
    assert not list(adopted_run_cache.folder().glob("*.json"))


def test_run_with_times_of_another_host_class_is_kept(machine: Machine, tmp_path: Path) -> None:
    """They are inconclusive there in every run, and the sessions judge them."""
    machine.sides["adopted"].counts = (replace(gone(Verdict.INCONCLUSIVE, "another host"), explains=True),)
    run_gate(machine, tmp_path / "first")
    run_gate(machine, tmp_path / "second")
    assert not measured_again(machine)


def test_oldest_kept_runs_are_deleted(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted_run_cache, "MOST", 2)
    for number in range(4):
        run_gate(machine, tmp_path / str(number), replace(TREE, commit=str(number)))
    assert (
        len(list(adopted_run_cache.folder().glob("*.json")))
        == len(list(adopted_run_cache.folder().glob("*.caches")))
        == 2
    )


def test_candidate_alone_runs_on_its_half_of_the_gpus(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept run was made on the other half. On all GPUs the candidate would be measured on another machine."""
    shares = divide(["0", "1", "2", "3"], 2, range(8))
    prepare, seen = machine.prepare, []
    monkeypatch.setattr(machine, "prepare", lambda out, **more: prepare(out, shares=shares, **more))
    run_lane = machine.run_lane

    def run(call: LaneCall, timeout: float | None = None) -> LaneRun:
        seen.append((call.python.name, call.environment.get("CUDA_VISIBLE_DEVICES")))
        return run_lane(call, timeout)

    monkeypatch.setattr(machine, "run_lane", run)
    for out in ("first", "second"):
        seen.clear()
        made = run_gate(machine, tmp_path / out)
        assert measured_again(machine) == (out == "first")
        assert ("candidate", "2,3") in seen
        assert ("candidate", "0,1,2,3") not in seen
        assert made.gate.decision is Decision.ADOPT
