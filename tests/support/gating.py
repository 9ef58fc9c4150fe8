"""A simulated machine for gates, without processes: simulated measurements of each side replace the runs."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bumpgate.core import gate_file
from bumpgate.core.findings import DriftReading
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Row, Value, Verdict, write_record
from bumpgate.gate import measure, pairing, runner, state
from bumpgate.gate.environments import EnvSpec
from bumpgate.gate.plan import plan_for
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate, GateConfig, SideState
from bumpgate.gate.view import View
from bumpgate.process.runner import NOTHING_SELECTED, Installed, LaneCall, LaneRun
from tests.support.lane_files import declare_lanes
from tests.support.tree import CANARIES

COUNT_TEST = "suites/compile/test_a.py::test_count[cpu]"
TIME_TEST = "suites/throughput/test_b.py::test_time[cpu]"
TIME_ROW = "throughput/b/seconds"
# Names of the sides in the seeds of their noise.
OF_SEED = {"adopted": "good", "candidate": "bad"}
TORCH = {"adopted": "2.13.0", "candidate": "2.14.0", "anchor": "2.12.0"}
TODAY = date(2026, 3, 2)
# Standard deviation of CPU seconds between fresh processes on a quiet machine (suites/throughput).
PROCESS_SD = 0.012


def count(
    value: Value = 13, verdict: Verdict = Verdict.PASS, id: str = "compile/a/graph_breaks"
) -> Judgement:
    return Judgement(Row(id, value, "breaks", 1, "C6", test=COUNT_TEST), verdict, "")


def gone(
    verdict: Verdict = Verdict.MISSING, reason: str = "not reported", test: str = COUNT_TEST
) -> Judgement:
    if test == COUNT_TEST:
        return Judgement(Row("compile/a/graph_breaks", None, "breaks", 0, "", test=test), verdict, reason)
    row = Row(TIME_ROW, None, "s", 0, "", better="lower", test=test)
    return Judgement(row, verdict, reason)


def seconds(value: float, id: str = TIME_ROW, spread: float = 0.03) -> Judgement:
    interval = (value * (1 - spread), value * (1 + spread))
    row = Row(id, value, "s", 1, "C37", better="lower", tolerance=0.1, interval=interval, test=TIME_TEST)
    return Judgement(row, Verdict.PASS, "")


@dataclass
class Behaviour:
    """One side. counts: rows of its single run, except timed ones. canaries: name -> reason of the failed ones.

    second: rows of a run that names tests, instead of counts; second_problems: those of that run.
    torch: its version; that of TORCH by default.
    packages: installed apart from torch.
    slower: row -> factor of its time.
    signal: ends the timed processes of sessions from `dies_from` on.
    spoiled: number of runs of the timed test disturbed by the machine; unreviewed: none of its rows is in the baseline.
    """

    torch: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    counts: Sequence[Judgement] = field(default_factory=lambda: [count()])
    problems: tuple[str, ...] = ()
    second: Sequence[Judgement] | None = None
    second_problems: tuple[str, ...] = ()
    canaries: Mapping[str, str] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)
    complete: bool = True
    signal: int = 0
    dies_from: int = 0
    spoiled: int = 0
    unreviewed: bool = False

    def disturbed(self, why: str) -> tuple[list[Judgement], list[Mapping[str, str]]]:
        """Return the rows and the problems of a disturbed run of the timed test."""
        if self.unreviewed:
            return [], [{"test": TIME_TEST, "kind": ProblemKind.INFRA.value, "why": why}]
        return [gone(Verdict.INFRA, why, TIME_TEST)], []


class Machine:
    """Simulates runs. Each timed process draws its bias from the session and its position in it, so an interrupted
    and resumed gate reads the same values."""

    def __init__(self, root: Path, seed: int = 0, sd: float = PROCESS_SD, rows: Sequence[str] = ()) -> None:
        (root / CANARIES).mkdir(parents=True)
        declare_lanes(root)
        self.root, self.cache_folder = root, root.with_name(f"{root.name}-caches")
        self.seed, self.sd = seed, sd
        self.rows = tuple(rows) or (TIME_ROW,)
        self.sides = {name: Behaviour() for name in TORCH}
        self.processes: list[str] = []
        self.read = Counter[tuple[str, str, int]]()
        self.before_process: Callable[[], None] = lambda: None
        self.recent: Mapping[str, Sequence[DriftReading]] = {}
        self.oldest: Mapping[str, float] = {}
        self.bench: PreparedGate | None = None

    def installed(self, python: Path, *_: object) -> Installed:
        side = self.sides[python.name]
        packages = {"torch": side.torch or TORCH[python.name], **side.packages}
        return Installed({} if side.failure else packages, {}, side.failure)

    def run_lane(self, call: LaneCall, timeout: float | None = None) -> LaneRun:
        python, selection, record = call.python, call.selection, call.record
        self.before_process()
        side = self.sides[python.name]
        timed = timeout is not None
        named = [part for part in selection if "::" in part]
        what = "timed" if timed else (named or selection or ["all"])[0]
        self.processes.append(f"{what}:{python.name}")
        if timed:
            return self._timed(python.name, side, record)
        if list(selection) == [CANARIES]:
            judgements = [self._canary(name, side.canaries.get(name, "")) for name in ("graphs", "inductor")]
            return self._done(record, judgements)
        problems: list[Mapping[str, str]] = []
        judgements = [*side.counts, *(seconds(self._value(python.name, row, -1)) for row in self.rows)]
        if side.spoiled:
            side.spoiled -= 1
            rows, problems = side.disturbed("none of 40 rounds was quiet")
            judgements = [*side.counts, *rows]
        if named:
            judgements = [*(judgements if side.second is None else side.second)]
            judgements = [j for j in judgements if j.row.test in named]
            side = replace(side, problems=side.second_problems)
        return self._done(record, judgements, side, problems)

    def run_lanes(self, calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        return [self.run_lane(call, timeout) for call in calls]

    def run_duet(self, calls: Sequence[LaneCall], flip: bool, timeout: float) -> list[LaneRun]:
        return self.run_lanes(calls, timeout)

    def _timed(self, name: str, side: Behaviour, record: Path) -> LaneRun:
        assert self.bench
        sessions = self.bench.gate.drifted if name == "anchor" else self.bench.gate.paired
        begun = sessions.started if sessions else 0
        if side.signal and begun >= side.dies_from:
            write_record(record, {"lane": "cpu"}, (), complete=False)
            return LaneRun(-side.signal, None, f"died of {signal.Signals(side.signal).name}", 0.1, record)
        if side.spoiled:
            side.spoiled -= 1
            rows, problems = side.disturbed("not quiet")
            return self._done(record, rows, problems=problems)
        return self._done(record, [seconds(self._value(name, row, begun), row) for row in self.rows])

    def _value(self, name: str, row: str, session: int) -> float:
        place = self.read[name, row, session]
        self.read[name, row, session] += 1
        dice = random.Random(f"{self.seed} {OF_SEED.get(name, name)} {row} {session} {place}")
        return 2.0 * self.sides[name].slower.get(row, 1.0) * 2.718281828459045 ** dice.gauss(0, self.sd)

    def _canary(self, name: str, reason: str) -> Judgement:
        row = Row(
            f"canaries/{name}/agrees", not reason, "bool", 1, "I1", expected=True,
            better="derived", evidence=(reason or "agrees",), test=f"{CANARIES}/test_c.py::test[{name}-cpu]",
        )  # fmt: skip
        return Judgement(row, Verdict.REGRESSION if reason else Verdict.PASS, reason)

    def _done(
        self,
        record: Path,
        judgements: Sequence[Judgement],
        side: Behaviour | None = None,
        problems: Sequence[Mapping[str, str]] = (),
    ) -> LaneRun:
        side = side or Behaviour()
        provenance = {
            "lane": self.bench.gate.config.lane if self.bench else "cpu",
            "torch": side.torch or "2.13.0",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        found = map(Problem.from_json, (*side.problems, *problems))
        made = write_record(record, provenance, judgements, complete=side.complete, problems=found)
        code = 0 if judgements or problems else NOTHING_SELECTED
        return LaneRun(code, made, "", 0.1, record.with_suffix(".log"))

    def _recent(self, lane: str, rows: Sequence[str], days: int) -> dict[str, list[DriftReading]]:
        first = TODAY - timedelta(days)
        return {row: [r for r in readings if r.day >= first] for row, readings in self.recent.items()}

    def caches(self, name: str) -> dict[str, str]:
        """Return the env_vars of a new pair of compile caches."""
        folder = self.cache_folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return {"CACHE": name, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}

    def prepare(self, out: Path, config: GateConfig | None = None, **options: Any) -> PreparedGate:
        """Prepare a gate on this machine; an existing gate in `out` is resumed."""
        config = config or GateConfig("cpu", candidate="torch==2.14.0")
        plan = plan_for(config.sessions)
        out.mkdir(exist_ok=True)
        sides = {name: SideState() for name in config.requests}
        begun = Gate(config, "2026-03-02T03:00:00+00:00", "bumpgate gate", sides=sides)
        gate = state.read(out, plan) or begun
        places = {name: EnvSpec(Path(f"/envs/{name}"), self.caches(name)) for name in gate.sides}
        view = View(Console(file=(out / "output.txt").open("a"), width=200))
        fixed = {"root": self.root, "out": out, "view": view, "plan": plan, "today": TODAY}
        fixed |= {"recent": self._recent, "oldest": lambda lane, rows, days: self.oldest}
        self.bench = PreparedGate(gate, places, fixed | options)
        return self.bench

    def gate(self, out: Path, config: GateConfig | None = None, **options: Any) -> Gate:
        """Run or resume one gate to its verdict."""
        made = self.prepare(out, config, **options)
        made.run()
        return made.gate

    def kill(
        self, out: Path, config: GateConfig | None = None, when: Callable[[], bool] = lambda: True
    ) -> None:
        """Run a gate that is killed before the first process for which `when` is true."""

        def look() -> None:
            if when():
                raise KilledError

        self.before_process = look
        with pytest.raises(KilledError):
            self.gate(out, config)
        self.before_process = lambda: None

    def plant(self, *sides: str, **fields: Any) -> None:
        """Change the behaviour of these sides."""
        for side in sides:
            self.sides[side] = replace(self.sides[side], **fields)


class KilledError(BaseException):
    """Simulates a kill: no handler of the gate catches it."""


@dataclass
class PreparedGate:
    """A gate that has not run yet.

    gate: its state, as last saved.
    environments: of its sides, which a test may change.
    """

    gate: Gate
    environments: dict[str, EnvSpec]
    options: dict[str, Any]

    @property
    def bench(self) -> Bench:
        """Return the bench; a gate that it saves becomes the state of this one."""
        started = time.monotonic() - self.gate.wall_seconds
        made = SavingBench(
            config=self.gate.config, environments=self.environments, started=started, **self.options
        )
        object.__setattr__(made, "saved", self)
        return made

    def run(self) -> None:
        self.gate = measure.run_gate(self.bench, self.gate)

    def enter(self) -> None:
        self.gate = measure.enter(self.bench, self.gate)


class SavingBench(Bench):
    """A bench that notes each state that it saves: the simulated processes read the number of their session there."""

    saved: PreparedGate

    def save(self, gate: Gate) -> Gate:
        self.saved.gate = super().save(gate)
        return self.saved.gate


def written(out: Path) -> GateFile:
    """Return the gate.json of a folder, as its readers see it."""
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, GateFile)
    return found


def labels(gate: Gate) -> list[tuple[str, str]]:
    """Return (decision, label) of each finding, worst first."""
    return [(f.decision.name, f.label) for f in gate.findings]


def attach(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gates run on this machine. Without fsync: these tests run hundreds of gates and do not test power loss."""
    monkeypatch.setattr(runner, "run_lanes", machine.run_lanes)
    monkeypatch.setattr(pairing, "run_duet", machine.run_duet)
    monkeypatch.setattr(measure, "installed", machine.installed)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
