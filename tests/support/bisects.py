"""Bisects without uv: fake nightlies, noisy probes, a journal with fixed outcomes, and a loop killed at every step."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bumpgate.bisect import bisection, journal
from bumpgate.bisect.attribution import Attribution, Mixture, attribute
from bumpgate.bisect.bisection import Setup
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.probe import Cause, ProbeResult, Reading, Test
from bumpgate.bisect.search import ProbeOutcome, Search, SearchResult
from bumpgate.env.build import Environment, NotInstallable
from bumpgate.env.request import Request

# Runs of a simulation.
RUNS = 1000
# A simulation's claim holds if it would pass by chance less often than this.
SIGNIFICANCE = 1e-3


def tail(count: int, trials: int, p: float) -> float:
    """Probability of at least `count` of `trials`."""
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))


def labels(n: int) -> list[str]:
    return [f"2.14.0.dev{day:04}" for day in range(n)]


def drive(searched: Any, read: Callable[[int], str], limit: int = 400) -> Any:
    """Run a search to its end, one probe at a time."""
    outcome = type(searched.old)
    for _ in range(limit):
        due = searched.next()
        if not due:
            return searched.result()
        index = due[0]
        searched.record(index, outcome[read(index)])
    raise AssertionError(f"no end after {limit} probes")


def noisy(first_bad: int, false_bad: float, false_good: float, dice: random.Random) -> Callable[[int], str]:
    def read(index: int) -> str:
        if index >= first_bad:
            return "GOOD" if dice.random() < false_good else "BAD"
        return "BAD" if dice.random() < false_bad else "GOOD"

    return read


# A bisect of 12 nights with fixed outcomes, run through its journal: the search, then the attribution.
DAYS = tuple(labels(12))
PLAN = BisectPlan(DAYS, DAYS[0], DAYS[-1], ("pytest", "-q"), false_bad=0.1, false_good=0.05)
PACKAGES = ("torch", "triton", "numpy")
GOOD_SET, BAD_SET = dict.fromkeys(PACKAGES, "1"), dict.fromkeys(PACKAGES, "2")
# The fault is at 7; 6 does not install; the second reading of the good endpoint and the first of 8 are false.
MISREAD = {(8, 0): "GOOD", (0, 0): "BAD"}


def read_candidate(searched: Search, index: int) -> ProbeOutcome:
    """Outcome of a probe: depends only on how often its candidate was read before."""
    if index == 6:
        return ProbeOutcome.SKIP
    before = Counter(i for i, _ in searched.history)[index]
    return ProbeOutcome[MISREAD.get((index, before), "BAD" if index >= 7 else "GOOD")]


def read_mixture(mixture: Mixture) -> ProbeOutcome:
    return ProbeOutcome.BAD if "triton" in mixture else ProbeOutcome.GOOD


def drive_journal(state: Any, probed: list[object] | None = None) -> Attribution:
    """Run a whole bisect: the search, then the attribution, each reading through the journal."""
    while state.search.result() is None:
        index = state.decide()[0]
        if probed is not None:
            probed.append(index)
        state.record(index, read_candidate(state.search, index))

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        state.decide_mixture(mixture)
        if probed is not None:
            probed.append(mixture)
        state.record_mixture(mixture, read_mixture(mixture))
        return read_mixture(mixture)

    return attribute(GOOD_SET, BAD_SET, probe, known=list(state.mixtures))


# The loop of a bisect, killed at every step and resumed.
NIGHTS = tuple(f"2.{n}.0" for n in range(12))


class Killed(BaseException):
    """Simulates kill -9: no handler runs after it."""


class KillPoints:
    """Counts the steps of a run and raises Killed at one of them."""

    def __init__(self, fatal: int = -1) -> None:
        self.count = 0
        self.fatal = fatal

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            raise Killed


class FakeTest(Test):
    """Detects the fault in triton; each run begins and ends with a kill point.

    runs: the package sets, one per run. misread: 1-based numbers of the runs that return the opposite.
    """

    def __init__(self, moments: KillPoints, runs: list[str], misread: tuple[int, ...] = ()) -> None:
        self.moments = moments
        self.runs = runs
        self.misread = misread

    def run(self, environment: Environment, place: Path) -> Reading:
        self.moments.pass_one()
        self.runs.append("/".join(environment.packages.values()))
        self.moments.pass_one()
        code = int(int(environment.packages["triton"].split(".")[1]) >= 7)
        if len(self.runs) in self.misread:
            code = 1 - code
        return Reading(place, Cause.RAN, code, seconds=0.0, packages=dict(environment.packages))

    def judge_run(self, reading: Reading) -> ProbeResult:
        return ProbeResult(ProbeOutcome.BAD if reading.code else ProbeOutcome.GOOD, f"exit {reading.code}")


class Silent:
    def probing(self, name: str) -> None:
        pass

    def probed(self, name: str, reading: Reading, result: ProbeResult, left: str) -> None:
        pass


def fake_build(request: Request) -> Environment:
    packages = dict(part.split("===") for part in request.requirements)
    version = packages["torch"]
    if version == "2.5.0" and "triton" not in packages:
        raise NotInstallable("torch 2.5.0: no such version", Path("log"), "")
    packages.setdefault("triton", version.replace("2.", "3.", 1))
    return Environment("fake", Path("/nowhere/bin/python"), "key", packages)


def run_loop(
    out: Path,
    moments: KillPoints,
    runs: list[str],
    module: Any = bisection,
    misread: tuple[int, ...] = (),
    **noise: float,
) -> tuple[SearchResult | None, list[str]]:
    """Run a bisect with attribution, resuming from `out`; each write of the journal has two kill points."""
    out.mkdir(exist_ok=True)
    plan = BisectPlan(NIGHTS, NIGHTS[0], NIGHTS[-1], ("x",), **noise)
    path = out / "state.jsonl"
    write = journal._write

    def writes(file: Any, entry: Any) -> None:
        moments.pass_one()
        write(file, entry)
        moments.pass_one()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_write", writes)
        patch.setattr(os, "fsync", lambda descriptor: None)
        whole = path.exists() and b"\n" in path.read_bytes()
        with journal.resume(path) if whole else journal.begin(path, plan) as state:

            def request(version: str) -> Request:
                return Request((f"torch==={version}",), name=f"torch {version}")

            test = FakeTest(moments, runs, misread)
            setup = Setup("torch", request, fake_build, test)
            run = module.Bisection(state, setup, out, Silent())
            result = run.run()
            return result, [str(change) for change in run.attribute(result).changes]


def readings(out: Path) -> dict[str, int | None]:
    """Map place -> exit code of every reading on disk."""
    return {p.parent.name: json.loads(p.read_text())["code"] for p in out.rglob("reading.json")}


def check_every_kill_point(module: Any, folder: Path) -> int:
    """Kill at each point in turn, and resume: the same answer, the same files, no repeated reading."""
    moments, quiet_runs = KillPoints(), list[str]()
    quiet = run_loop(folder / "quiet", moments, quiet_runs, module)
    assert quiet[0] is not None
    assert (quiet[0].suspects, quiet[1]) == ((7,), ["triton 3.6.0 -> 3.7.0"])
    for fatal in range(1, moments.count + 1):
        out, runs = folder / str(fatal), list[str]()
        with pytest.raises(Killed):
            run_loop(out, KillPoints(fatal), runs, module)
        lost = len(runs) - sum(code is not None for code in readings(out).values())
        assert run_loop(out, KillPoints(), runs, module) == quiet, fatal
        assert len(runs) == len(quiet_runs) + lost, f"moment {fatal}: a saved reading was repeated"
        assert readings(out) == readings(folder / "quiet"), fatal
        assert (out / "state.jsonl").read_bytes() == (folder / "quiet/state.jsonl").read_bytes(), fatal
    return moments.count
