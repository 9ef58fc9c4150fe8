"""Bisect of a row that a gate calls SLOWER: paired probes of fake sides with known times, and of two real processes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bumpgate.bisect import gate_finding, journal, options, timed_probe
from bumpgate.bisect.bisection import Bisection, Setup
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.gate_finding import GateFinding, GateFindingError, finding_of, load
from bumpgate.bisect.options import Options
from bumpgate.bisect.probe import Cause, ProbeResult, Reading
from bumpgate.bisect.search import OTHER, SKIP, UNKNOWN, ProbeOutcome, SearchResult
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.gate_file import GATE_SCHEMA, GateFile
from bumpgate.core.gate_file import read as read_gate
from bumpgate.core.rows import Judgement, Problem, Record, Row, Verdict, write_record
from bumpgate.env.build import Environment
from bumpgate.env.request import Request
from bumpgate.env.versions import FoundVersion
from bumpgate.gate.verdict import Side
from bumpgate.process.runner import LaneCall, LaneRun
from bumpgate.wheels import fitting
from tests.support.builds import Ran, bisecting
from tests.support.gate_tree import TIMES_TEST, Tree
from tests.support.lane_files import declare_lanes
from tests.support.reports import HERE, paired, write_gate

ROW, TEST = "throughput/b/seconds", "suites/throughput/test_b.py::test_time[cpu]"
NIGHTS = tuple(f"2.{n}.0" for n in range(12))
GOOD = NIGHTS[0]
# Standard deviation of the time of fresh processes on a quiet machine (docs/gate.md).
PROCESS_SD = 0.012


def judged(seconds: float, row: str = ROW) -> Judgement:
    made = Row(
        row, seconds, "s", 1, "C37", better="lower", interval=(0.97 * seconds, 1.03 * seconds), test=TEST
    )
    return Judgement(made, Verdict.PASS, "")


class Killed(BaseException):
    """Simulates kill -9."""


class Sides:
    """Fake processes. slower: version -> factor of its time. failing: versions whose test fails.

    lost: versions whose times the machine disturbs. sessions: number of sessions per version.
    """

    def __init__(self, slower: Mapping[str, float], sd: float = PROCESS_SD) -> None:
        self.slower, self.sd = slower, sd
        self.failing: set[str] = set()
        self.lost: set[str] = set()
        self.sessions = Counter[str]()
        self.dice = random.Random(5)
        self.kill_at = -1

    def run_duet(self, calls: Sequence[LaneCall], flip: bool, timeout: float | None) -> list[LaneRun]:
        good, bad = (call.python.name for call in calls)
        assert good == GOOD
        if sum(self.sessions.values()) == self.kill_at:
            self.kill_at = -1
            raise Killed
        self.sessions[bad] += 1
        return [self._process(call) for call in calls]

    def run_lanes(self, calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        return [self._process(call) for call in calls]

    def _process(self, call: LaneCall) -> LaneRun:
        version = call.python.name
        seconds = 2 * self.slower.get(version, 1.0) * math.exp(self.dice.gauss(0, self.sd))
        rows, problems = [judged(seconds)], []
        if version in self.failing:
            rows, problems = [], [f"{TEST}: RuntimeError: no kernel image"]
        if version in self.lost:
            rows = [Judgement(Row(ROW, None, "s", 0, "", test=TEST), Verdict.INFRA, "no quiet round")]
        record = Record({"lane": "cpu"}, tuple(rows), True, tuple(map(Problem.from_json, problems)))
        return LaneRun(0, record, "", 0.1, call.record.with_suffix(".log"))


def build(request: Request) -> Environment:
    version = request.requirements[0].rpartition("=")[2]
    return Environment(version, Path("/envs") / version, version, {"torch": version})


def request(version: str) -> Request:
    return Request((f"torch==={version}",), name=f"torch {version}")


patch = pytest.MonkeyPatch()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree with a lane; what timed_test replaces in the module is undone."""
    (tmp_path / "tree").mkdir()
    declare_lanes(tmp_path / "tree")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    patch.undo()


class Silent:
    """Progress callbacks that keep the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def probing(self, name: str) -> None:
        pass

    def probed(self, name: str, reading: Any, result: Any, left: str) -> None:
        self.reasons.append(f"{result.outcome.value} {name}: {result.reason}")


def timed_test(root: Path, sides: Sides, ratio: float = 1.10, fault: str = "") -> timed_probe.TimedTest:
    """Return the test of one row with fake processes. ratio: the slowdown that a gate reported."""
    fakes = {"run_duet": sides.run_duet, "run_lanes": sides.run_lanes, "shares": lambda: [[0], [1]]}
    for name, fake in (fakes | {"import_fault": lambda environment, *packages: fault}).items():
        patch.setattr(timed_probe, name, fake)
    found = GateFinding("cpu", (TEST,), {}, {}, {ROW: TEST}, {ROW: ratio})
    return timed_probe.TimedTest(root / "tree", "cpu", found, lambda: build(request(GOOD)), "torch")


def read(root: Path, sides: Sides, fault: str = "") -> tuple[Reading, ProbeResult]:
    """Take one reading of the version 2.4.0 and judge it."""
    test, place = timed_test(root, sides, fault=fault), root / "reading"
    place.mkdir()
    made = test.run(build(request(NIGHTS[4])), place)
    return made, test.judge(made)


def judge(root: Path, values: Sequence[float] = (), tests: Mapping[str, str] = {ROW: TEST}) -> ProbeResult:
    """Judge a reading whose sessions have these ratios, in logarithm; without any, they are missing."""
    test = timed_test(root, Sides({}))
    if values:
        sessions = timed_probe.Sessions(tests, test.plan, test.plan.budget, {ROW: list(values)})
        (root / timed_probe.SESSIONS).write_text(json.dumps(sessions.to_json()))
    return test.judge(Reading(root, Cause.RAN, timed_probe.MEASURED))


def config(nights: Sequence[str] = NIGHTS) -> tuple[Options, Range]:
    span = Range("torch", tuple(nights), nights[0], nights[-1], {})
    return Options(good=nights[0], bad=nights[-1], lane="cpu", selection=(TEST,)), span


def search(
    root: Path, sides: Sides, ratio: float = 1.10, nights: Sequence[str] = NIGHTS
) -> tuple[SearchResult, Silent]:
    """Bisect the row over `nights`, continuing what is in the folder."""
    test, show, out = timed_test(root, sides, ratio), Silent(), root / "out"
    out.mkdir(exist_ok=True)
    path = out / "state.jsonl"
    options, span = config(nights)
    with journal.resume(path) if path.exists() else journal.begin(path, options.plan(span, test)) as state:
        setup = Setup("torch", request, build, test, reliable=True)
        return Bisection(state, setup, out, show).run(), show


def test_misread_rates_of_timed_rows_are_bounds_unless_stated(root: Path) -> None:
    test = timed_test(root, Sides({}))
    options, span = config()
    plan = options.plan(span, test)
    assert (plan.false_bad, plan.false_good, plan.confirm) == (*test.misreads, 1)
    assert 0 < plan.false_bad < 0.5
    assert 0 < plan.false_good < 0.5
    stated = replace(options, false_bad=0.2, false_good=0.3).plan(span, test)
    assert (stated.false_bad, stated.false_good) == (0.2, 0.3)


@pytest.mark.parametrize("first", [1, 7, 11])
def test_slower_row_is_bisected_by_paired_probes(root: Path, first: int) -> None:
    """10 % slower from one version on: found, in few sessions, and the good end is never measured."""
    sides = Sides(dict.fromkeys(NIGHTS[first:], 1.10))
    result, show = search(root, sides)
    assert (result.suspects, result.sure(0.98)) == ((first,), True), show.reasons
    assert sides.sessions[GOOD] == 0
    # 6 sessions for SAME and 12 for SLOWER; a repeat only if the misread rates leave a doubt.
    assert len([r for r in show.reasons if f" {GOOD}:" not in r]) <= 8, show.reasons
    assert sum(sides.sessions.values()) <= 90, sides.sessions


def test_timed_bisect_limit_is_half_of_the_slowdown(root: Path) -> None:
    """A first step of 2 % and a later one to 12 %: the answer is the later one, not a coin flip between margins."""
    sides = Sides({**dict.fromkeys(NIGHTS[3:8], 1.02), **dict.fromkeys(NIGHTS[8:], 1.12)})
    result, show = search(root, sides, ratio=1.12)
    assert result.suspects == (8,), show.reasons


def test_bad_end_that_is_not_slower_is_refused(root: Path) -> None:
    result, _ = search(root, Sides({}), nights=NIGHTS[:3])
    assert result.failure.startswith("the bad endpoint 2.2.0 is GOOD: name a later one")


def test_undecided_timed_row_is_unknown(root: Path) -> None:
    """As slow as the limit itself, with noise: no verdict, and neither GOOD nor BAD is recorded."""
    sides = Sides({NIGHTS[4]: math.sqrt(1.10)}, sd=0.03)
    _, result = read(root, sides)
    assert result.outcome is UNKNOWN
    assert result.reason.startswith(f"undecided: {ROW} ")
    assert sides.sessions[NIGHTS[4]] == timed_probe.MOST


@pytest.mark.parametrize(("slow", "outcome"), [(0, ProbeOutcome.GOOD), (3, UNKNOWN)])
def test_frequent_slow_processes_are_not_good(root: Path, slow: int, outcome: ProbeOutcome) -> None:
    """In the median not slower; three of twelve processes took twice as long."""
    values = [0.001 * (-1) ** n for n in range(12)]
    values[3 : 3 + slow] = [math.log(2)] * slow
    assert judge(root, values).outcome is outcome


def test_reading_without_its_sessions_is_not_green(root: Path) -> None:
    assert judge(root).outcome is UNKNOWN
    other = judge(root, [0.0] * 12, {ROW: "suites/throughput/test_other.py::test_other[cpu]"})
    assert (other.outcome, other.reason) == (UNKNOWN, f"{timed_probe.SESSIONS} is missing")


@pytest.mark.parametrize(
    ("attribute", "version", "cause", "outcome", "sessions"),
    [
        ("failing", NIGHTS[4], Cause.RAN, OTHER, timed_probe.FAILING),
        ("failing", GOOD, Cause.MACHINE, SKIP, 8),
        ("lost", NIGHTS[4], Cause.MACHINE, SKIP, 8),
    ],
    ids=["candidate fails", "good end fails", "disturbed"],
)
def test_probe_without_a_time_is_neither_good_nor_bad(
    root: Path, attribute: str, version: str, cause: Cause, outcome: ProbeOutcome, sessions: int
) -> None:
    sides = Sides({})
    getattr(sides, attribute).add(version)
    made, result = read(root, sides)
    assert (made.cause, result.outcome) == (cause, outcome)
    assert sides.sessions[NIGHTS[4]] == sessions
    # A failure of the machine is measured again from its first session.
    assert (made.place / timed_probe.SESSIONS).exists() == (cause is Cause.RAN)


def test_candidate_that_does_not_import_is_skipped(root: Path) -> None:
    sides = Sides({})
    sides.failing.add(NIGHTS[4])
    made, result = read(root, sides, fault="import torch: killed by SIGSEGV")
    assert (made.cause, result.outcome) == (Cause.BROKEN, SKIP)


def test_killed_probe_continues_with_its_sessions(root: Path) -> None:
    sides = Sides(dict.fromkeys(NIGHTS[2:], 1.10))
    sides.kill_at = 9

    def started() -> list[int]:
        found = (root / "out/probes").glob("*/sessions.json")
        return [json.loads(path.read_text())["started"] for path in found]

    with pytest.raises(Killed):
        search(root, sides, nights=NIGHTS[:4])
    assert started() == [9]
    result, _ = search(root, sides, nights=NIGHTS[:4])
    assert result.suspects == (2,)
    assert sum(started()) == sides.sessions.total(), "a saved session was run again"


# --from-gate


def finding(label: str, *rows: str, decision: str = "HOLD", tests: Sequence[str] = ()) -> dict[str, Any]:
    found = {"decision": decision, "label": label, "metric": "seconds", "head": "", "repro": ""}
    return found | {"rows": list(rows), "tests": list(tests), "adopted": [], "candidate": []}


def gate_file(
    folder: Path, *findings: dict[str, Any], ratios: Mapping[str, float] = {ROW: 1.2}, **changes: Any
) -> Path:
    """Write a gate.json with the records of both sides. ratios: row id -> ratio in the paired sessions."""
    folder.mkdir(exist_ok=True)
    sides = {}
    for name, version in (("adopted", "2.0.0"), ("candidate", "2.1.0")):
        rows = [judged(2.0, row) for row in ratios]
        write_record(folder / f"{name}.json", {"lane": "cpu"}, rows, complete=True, problems=())
        packages = {"torch": version, "triton": f"3.{version[2]}.0", "numpy": "2.0"}
        sides[name] = {"name": name, "record": f"{name}.json", "packages": packages}
    timed = {
        row: {"outcome": "SLOWER", "ratio": ratio, "interval": [ratio, ratio], "sessions": 16}
        for row, ratio in ratios.items()
    }
    decisions = [found["decision"] for found in findings]
    worst = next((word for word in ("HOLD", "UNKNOWN") if word in decisions), "ADOPT")
    raw = {
        "schema": GATE_SCHEMA,
        "lane": "cpu",
        "decision": worst,
        "config": {"sessions": None},
        "finished": True,
    }
    raw |= {"sides": sides, "findings": findings, "timed": timed}
    (folder / "gate.json").write_text(json.dumps(raw | changes))
    return folder / "gate.json"


def of_gate(path: Path, row: str = "") -> GateFinding:
    gate = read_gate(path)
    assert isinstance(gate, GateFile)
    return finding_of(path, gate, row)


def test_slower_finding_gives_rows_and_slowdowns_of_one_test(tmp_path: Path) -> None:
    path = gate_file(tmp_path, finding("SLOWER", ROW), ratios={ROW: 1.2, "throughput/c/seconds": 1.5})
    found = of_gate(path)
    assert (found.lane, found.nodes, found.ratios, found.tests) == ("cpu", (TEST,), {ROW: 1.2}, {ROW: TEST})
    assert found.versions("torch") == ("2.0.0", "2.1.0")
    assert of_gate(path, ROW) == found


def test_finding_of_a_count_gives_its_tests(tmp_path: Path) -> None:
    count = finding("CHANGED", ROW)
    found = of_gate(gate_file(tmp_path, finding("WIN", ROW, decision="ADOPT"), count, ratios={ROW: 1.0}))
    assert (found.nodes, found.ratios) == ((TEST,), {})
    problem = finding("PROBLEM", tests=["suites/a.py::test_x[cpu]"])
    assert of_gate(gate_file(tmp_path, problem)).nodes == ("suites/a.py::test_x[cpu]",)


OTHER_ROW = "throughput/x/seconds"


@pytest.mark.parametrize(
    ("found", "row", "words"),
    [
        (finding("SLOW MODE", ROW), "", "a SLOW MODE finding cannot be bisected"),
        (finding("CREEP", ROW), "", "a CREEP finding cannot be bisected"),
        (finding("WIN", ROW, decision="ADOPT"), "", "no finding that holds the candidate back"),
        (finding("SLOWER", ROW), OTHER_ROW, f"their rows: {ROW}"),
        (finding("SLOWER", OTHER_ROW), "", f"lacks the times or the test of {OTHER_ROW}"),
        (finding("PROBLEM"), "", "names no test"),
    ],
    ids=["slow mode", "creep", "none holds", "unknown row", "no time", "no test"],
)
def test_gate_that_cannot_be_bisected_is_one_line(
    found: dict[str, Any], row: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(GateFindingError, match=words) as error:
        of_gate(gate_file(tmp_path, found), row)
    assert "\n" not in str(error.value)


def test_package_that_did_not_move_is_refused(tmp_path: Path) -> None:
    found = of_gate(gate_file(tmp_path, finding("SLOWER", ROW)))
    moved = r"numpy is 2\.0 on both sides; name --package \(torch, triton\)"
    for package, words in (("numpy", moved), ("jax", "a side lacks jax")):
        with pytest.raises(GateFindingError, match=words):
            found.versions(package)


def test_record_is_not_a_gate(tmp_path: Path) -> None:
    gate_file(tmp_path)
    with pytest.raises(GateFindingError, match=r"is a record: --from-gate needs the gate\.json"):
        load(tmp_path / "adopted.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--row", ROW), "--row names a row of --from-gate GATE_JSON"),
        (("--from-gate", "g/gate.json", "--lane", "cpu"), "leave out --lane"),
        (("--from-gate", "absent.json"), "absent.json: cannot be read"),
    ],
)
def test_invalid_use_of_from_gate_is_one_line(arguments: Sequence[str], words: str, tmp_path: Path) -> None:
    gate_file(tmp_path / "g", finding("SLOWER", ROW))
    with bisecting(tmp_path) as run:
        ran = run(*arguments)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (4, "", 1), ran
    assert words in ran.err


SLOW = "throughput/slow/ratio"


def bisect_tree(tree: Tree, *arguments: str) -> Ran:
    """Run the command in a tree whose interpreters represent two versions of torch."""
    pythons = {"2.0.0": tree.adopted, "2.1.0": tree.candidate}

    def prepared(request: Request) -> Environment:
        version = next(r for r in request.requirements if r.startswith("torch===")).rpartition("=")[2]
        return Environment(version, pythons[version], version, {"torch": version})

    def listed(*_: object, **__: object) -> list[FoundVersion]:
        return [FoundVersion(version, date(2026, 1, 5), None, "") for version in pythons]

    with pytest.MonkeyPatch.context() as patch, bisecting(tree.root) as run:
        patch.setattr("tempfile.tempdir", str(tree.root))
        patch.setenv("BUMPGATE_HOME", str(tree.root / "home"))
        patch.setattr(options, "build", prepared)
        patch.setattr(fitting, "build", prepared)
        patch.setattr(options, "versions", listed)
        patch.setattr(timed_probe, "COPIES", 1)
        return run(*arguments)


def test_slower_finding_of_a_gate_is_bisected_end_to_end(tmp_path: Path) -> None:
    """Two real interpreters, of which the second does four times the work; 7 sessions are the fewest for SLOWER."""
    tree = Tree(tmp_path)
    tree.candidate = tree.interpreter("candidate", SLOWER="4")
    row = Row(SLOW, 1.0, "ratio", 1, "C37", better="lower", test=TIMES_TEST, paired=True)
    measured = Record(HERE, (Judgement(row, Verdict.PASS, ""),))
    (tmp_path / "g").mkdir()
    sides = (Side(f"torch {version}", measured) for version in ("2.0.0", "2.1.0"))
    path, _ = write_gate(tmp_path / "g", *sides, {SLOW: paired(TimedOutcome.SLOWER, 4.0)}, sessions=7)
    ran = bisect_tree(tree, "--from-gate", "g", "--out", "out", "--no-attribution")
    assert ran.code == 0, ran
    answer = json.loads((tmp_path / "out/bisect.json").read_text())
    assert (answer["first"], answer["last"], answer["sure"]) == ("2.1.0", "2.0.0", True)
    assert answer["deciding"] == [SLOW]
    assert answer["findings"][0]["label"] == "SLOWER"
    assert "BAD     torch 2.1.0 in " in ran.out
    assert f"slower: {SLOW} +" in ran.out
    assert "--python-candidate" in answer["repro"]
    sessions = json.loads((tmp_path / "out/probes/2.1.0.0/sessions.json").read_text())
    assert len(sessions["log_ratios"][SLOW]) == 7
    assert min(sessions["log_ratios"][SLOW]) > math.log(2), sessions
    assert gate_finding.load(path).ratios == {SLOW: pytest.approx(4.0)}
