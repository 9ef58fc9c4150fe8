"""The loop of a bisect without uv or processes, killed at every step and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bumpgate.bisect import bisection, journal
from bumpgate.bisect.bisection import Setup
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.probe import Cause, ProbeResult, Reading, Test, load, take
from bumpgate.bisect.search import ProbeOutcome, SearchResult
from bumpgate.env.build import Environment, NotInstallable
from bumpgate.env.request import Request

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


class FakeHosts:
    """Takes the readings of a batch in reverse order, one kill point after each."""

    def __init__(self, test: FakeTest, number: int) -> None:
        self.test = test
        self.most = number

    def number(self) -> int:
        return self.most

    def take(self, jobs: Sequence[tuple[Path, Request]]) -> Iterator[Reading]:
        for place, request in reversed(jobs):
            assert load(place) is None, f"{place} is taken again"
            yield take(place, request, fake_build, self.test)
            self.test.moments.pass_one()


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
    hosts: int = 1,
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
            run = module.Bisection(
                state, setup, out, FakeHosts(test, hosts) if hosts > 1 else setup, Silent()
            )
            result = run.run()
            return result, [str(change) for change in run.attribute(result).changes]


def readings(out: Path) -> dict[str, int | None]:
    """Map place -> exit code of every reading on disk."""
    return {p.parent.name: json.loads(p.read_text())["code"] for p in out.rglob("reading.json")}


def check_every_kill_point(module: Any, folder: Path, hosts: int = 1) -> int:
    """Kill at each point in turn, and resume: the same answer, the same files, no repeated reading."""
    moments, quiet_runs = KillPoints(), list[str]()
    quiet = run_loop(folder / "quiet", moments, quiet_runs, module, hosts=hosts)
    assert quiet[0] is not None
    assert (quiet[0].suspects, quiet[1]) == ((7,), ["triton 3.6.0 -> 3.7.0"])
    for fatal in range(1, moments.count + 1):
        out, runs = folder / str(fatal), list[str]()
        with pytest.raises(Killed):
            run_loop(out, KillPoints(fatal), runs, module, hosts=hosts)
        lost = len(runs) - sum(code is not None for code in readings(out).values())
        assert run_loop(out, KillPoints(), runs, module, hosts=hosts) == quiet, fatal
        assert len(runs) == len(quiet_runs) + lost, f"moment {fatal}: a saved reading was repeated"
        assert readings(out) == readings(folder / "quiet"), fatal
        if hosts == 1:
            assert (out / "state.jsonl").read_bytes() == (folder / "quiet/state.jsonl").read_bytes(), fatal
    return moments.count
