"""What a gate measures, in which order, and its verdict; each fault is injected in one side of a machine.

The machine of tests/support/gating.py runs no process: test_gate_faults.py uses real ones.
"""

from __future__ import annotations

import errno
import fcntl
import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate import cli
from bumpgate.core import gate_file
from bumpgate.core.findings import NO_REGRESSION, Decision, Finding
from bumpgate.core.rows import Judgement, Verdict, read_record
from bumpgate.env.build import BuildError, NotInstallable
from bumpgate.gate import command as gate
from bumpgate.gate import drift, environments, measure, options, pairing, runner, state
from bumpgate.gate.environments import EnvSpec, side_name
from bumpgate.gate.options import GateConfig, GateError
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate
from bumpgate.gate.timed import MAX_EMPTY_SESSIONS, SIDE
from bumpgate.process.runner import USAGE, Installed, LaneCall, LaneRun
from bumpgate.report import markdown, page
from bumpgate.report.html_page import html_page
from suites.support.planted import planted
from tests.support.gate_tree import COUNTS, TIMED, TIMES_TEST, Tree, wait_for
from tests.support.gating import COUNT_TEST, TIME_TEST, Machine, attach, count, gone, labels
from tests.support.lane_files import write_lane
from tests.support.project import GOOD
from tests.support.tree import CANARIES


def test_unchanged_pair_is_adopted(machine: Machine, out: Path) -> None:
    gate = machine.gate(out)
    assert (gate.decision, gate.findings, gate.finished) == (Decision.ADOPT, (), True)
    steps = list(dict.fromkeys(machine.processes))
    canary = f"{CANARIES}:"
    assert steps == [
        canary + "adopted",
        canary + "candidate",
        "all:adopted",
        "all:candidate",
        "timed:adopted",
        "timed:candidate",
    ]
    assert machine.processes[4:8] == ["timed:adopted", "timed:candidate"] * 2


def test_sides_that_share_a_gpu_take_turns(machine: Machine, out: Path) -> None:
    machine.gate(out, GateConfig("h200", candidate="torch==2.14.0"))
    assert machine.processes[2:4] == ["all:adopted", "all:candidate"]
    order = [p.removeprefix("timed:") for p in machine.processes[4:12]]
    assert order == [SIDE[letter] for letter in "ABBABAAB"]


def test_gate_saves_every_step_before_the_next(machine: Machine, out: Path) -> None:
    seen = []

    def look() -> None:
        raw = json.loads((out / state.NAME).read_text())
        assert (raw["decision"], raw["exit_code"], raw["finished"]) == ("UNKNOWN", 125, False)
        sides = raw["sides"]
        done = [(s["canaries"] is not None) + s["measured"] for s in sides.values()]
        seen.append((*done, (raw["sessions"] or {"started": 0})["started"]))

    machine.before_process = look
    machine.gate(out)
    # Both sides of a step run concurrently.
    assert seen[:5] == [(0, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 0), (2, 2, 0)]
    assert [s[2] for s in seen[4:]] == [i // 2 for i in range(len(seen[4:]))]
    raw = json.loads((out / state.NAME).read_text())
    assert (raw["decision"], raw["exit_code"], raw["finished"]) == ("ADOPT", 0, True)


def test_report_reads_the_written_gate(machine: Machine, out: Path) -> None:
    machine.sides["candidate"].slower = {"throughput/b/seconds": 1.2}
    gate = machine.gate(out, GateConfig("cpu", candidate="torch==2.14.0", anchor="torch==2.12.0"))
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    assert (found.decision, found.findings) == (Decision.HOLD, gate.findings)
    paired = found.timed["throughput/b/seconds"]
    assert (paired.outcome, paired.sessions) == ("SLOWER", len(paired.log_ratios))
    assert paired.ratio == pytest.approx(1.2, rel=0.03)
    assert found.adopted.record == read_record(out / "adopted.json")
    assert found.readings["throughput/b/seconds"] == pytest.approx(math.log(1.2), abs=0.03)


def test_gate_lists_every_package_that_moved(machine: Machine, out: Path) -> None:
    machine.sides["adopted"].packages = {"triton": "3.7.1", "numpy": "2.4.6", "filelock": "3.0"}
    machine.sides["candidate"].packages = {"triton": "3.8.0", "numpy": "2.4.6", "nvidia-nccl": "2.30"}
    machine.sides["candidate"].torch = "2.14.0"
    machine.gate(out)
    moved = (
        "filelock 3.0 -> (absent)",
        "nvidia-nccl (absent) -> 2.30",
        "torch 2.13.0 -> 2.14.0",
        "triton 3.7.1 -> 3.8.0",
    )
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    assert found.moved == moved
    printed = [line for line in (out / "output.txt").read_text().splitlines() if line.startswith("moved: ")]
    assert printed == [f"moved: {line}" for line in moved]
    shown = page.of(found)
    assert "4 packages moved" in markdown.summary(shown)
    for form in (html_page(shown), markdown.summary(shown)):
        assert all(line in form or html.escape(line) in form for line in moved)


def test_gate_without_a_side_lists_no_moved_package(machine: Machine, out: Path) -> None:
    machine.sides["candidate"].failure = "import torch: killed by SIGSEGV"
    machine.gate(out)
    assert json.loads((out / state.NAME).read_text())["moved"] == []


def test_row_5_percent_slower_is_held(machine: Machine, out: Path) -> None:
    machine.sides["candidate"].slower = {"throughput/b/seconds": 1.05}
    gate = machine.gate(out)
    assert labels(gate) == [("HOLD", "SLOWER")]
    line = f"/envs/candidate -m pytest -p bumpgate.plugin --rootdir=. -m cpu -n 0 '{TIME_TEST}'"
    assert gate.findings[0].repro.endswith(f" {line}")
    assert gate.timed["throughput/b/seconds"].interval[0] > 1.01


def test_5_percent_slowdown_is_found_19_times_of_20(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise PROCESS_SD per process; test_sequential has the detection rate for other noise."""
    held = 0
    for seed in range(20):
        machine = Machine(tmp_path / f"tree{seed}", seed)
        machine.sides["candidate"].slower = {"throughput/b/seconds": 1.05}
        attach(machine, monkeypatch)
        held += machine.gate(tmp_path / f"out{seed}").decision is Decision.HOLD
    assert held >= 19


def changed(value: object = 14) -> list[Judgement]:
    return [count(value, Verdict.CHANGED)]


FAULTS = {
    "a changed exact row": ({"counts": changed()}, Decision.HOLD, "CHANGED"),
    "a lost row": ({"counts": [gone()]}, Decision.HOLD, "MISSING"),
    "a lost row in a run cut short": ({"counts": [gone()], "complete": False}, Decision.UNKNOWN, "MISSING"),
    "a failed test": ({"problems": (f"{COUNT_TEST}: assert 1 == 2",)}, Decision.HOLD, "PROBLEM"),
    "a canary that disagrees": ({"canaries": {"graphs": "read 0, known 1"}}, Decision.UNKNOWN, "INSTRUMENT"),
    "a row whose instrument broke": (
        {"counts": [count(13, Verdict.INSTRUMENT)]}, Decision.UNKNOWN, "INSTRUMENT",
    ),
    "a torch that does not import": ({"failure": "import torch: exit 1"}, Decision.UNKNOWN, "INFRA"),
    "a crash in timed processes": ({"signal": signal.SIGSEGV, "dies_from": 3}, Decision.HOLD, "PROBLEM"),
    "a kill from outside": ({"signal": signal.SIGKILL}, Decision.HOLD, "LOST"),
    "a timed row lost for adopted": ({"spoiled": 1000}, Decision.HOLD, "LOST"),
    "an unreviewed one": ({"spoiled": 1000, "unreviewed": True}, Decision.HOLD, "LOST"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_decision_for_each_fault_of_the_candidate(machine: Machine, out: Path, fault: str) -> None:
    planted, decision, label = FAULTS[fault]
    for name, value in planted.items():  # type: ignore[attr-defined]
        setattr(machine.sides["candidate"], name, value)
    gate = machine.gate(out)
    assert gate.decision is decision, gate.findings
    assert label in [found for _, found in labels(gate)]


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        (
            {"counts": changed()},
            ["first answer: HOLD, whatever the times are (1 finding)", "  CHANGED graph_breaks"],
        ),
        (
            {"problems": (f"{COUNT_TEST}: assert 1 == 2",)},
            ["first answer: HOLD, whatever the times are (1 finding)", "  PROBLEM assert 1 == 2"],
        ),
        (
            {"complete": False},
            ["first answer: UNKNOWN, unless the times hold the candidate (1 finding)", "  INFRA the run"],
        ),
        ({"spoiled": 2}, ["first answer: only the times can still hold the candidate"]),
        ({"spoiled": 2, "unreviewed": True}, ["first answer: only the times can still hold the candidate"]),
        (
            {"slower": {"throughput/b/seconds": 9.0}},
            ["first answer: only the times can still hold the candidate"],
        ),
    ],
)
def test_first_answer_precedes_the_sessions(
    machine: Machine, out: Path, fault: dict, lines: list[str]
) -> None:
    for name, value in fault.items():
        setattr(machine.sides["candidate"], name, value)
    saved: list[Finding] = []

    def look() -> None:
        raw = json.loads((out / state.NAME).read_text())
        if raw["sessions"] and not raw["sessions"]["started"]:
            saved[:] = [Finding(**f | {"decision": Decision[f["decision"]]}) for f in raw["findings"]]

    machine.before_process = look
    machine.gate(out)
    printed = (out / "output.txt").read_text().splitlines()
    assert [f.label for f in saved] == [line.split()[0] for line in lines[1:]]
    at = printed.index(lines[0])
    assert all(line.startswith(begin) for line, begin in zip(printed[at:], lines))
    assert at < next(i for i, line in enumerate(printed) if "timed rows after" in line)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_the_adopted_build_does_not_hold(machine: Machine, out: Path, fault: str) -> None:
    """In the adopted build only, it is a gap or a fix, not a fault of the candidate."""
    for name, value in FAULTS[fault][0].items():  # type: ignore[attr-defined]
        setattr(machine.sides["adopted"], name, value)
    gate = machine.gate(out)
    fixed = fault == "a changed exact row"
    assert gate.decision is (Decision.ADOPT if fixed else Decision.UNKNOWN), gate.findings


def test_candidate_that_does_not_import_is_not_run(machine: Machine, out: Path) -> None:
    machine.sides["candidate"].failure = "import torch: killed by SIGSEGV"
    gate = machine.gate(out)
    assert machine.processes == []
    assert gate.findings[0].head == "import torch: killed by SIGSEGV"


def test_empty_selection_is_unknown(machine: Machine, out: Path) -> None:
    machine.rows = ()
    for side in machine.sides.values():
        side.counts = []
    assert labels(machine.gate(out)) == [("UNKNOWN", "NOTHING")]


def test_empty_sessions_end_after_a_limit(machine: Machine, out: Path) -> None:
    machine.sides["candidate"].signal = signal.SIGABRT
    gate = machine.gate(out)
    assert gate.paired
    assert (gate.paired.started, gate.paired.open_rows()) == (MAX_EMPTY_SESSIONS, [])
    assert labels(gate) == [("HOLD", "LOST"), ("HOLD", "PROBLEM"), ("UNKNOWN", "INCONCLUSIVE")]
    assert gate.findings[1].candidate[0] == f"{TIME_TEST}: died of SIGABRT (in 8 timed processes, 8 sessions)"


@pytest.mark.parametrize(
    ("crashing", "decision"),
    [
        (("adopted",), Decision.ADOPT),
        (("candidate",), Decision.HOLD),
        (("adopted", "candidate"), Decision.UNKNOWN),
    ],
)
def test_crash_in_one_session_counts_against_the_candidate_alone(
    machine: Machine, out: Path, crashing: tuple[str, ...], decision: Decision
) -> None:
    """The later sessions decide the row, so a crash of the adopted build alone is shown and leaves no gap."""

    def crash_in_third_session() -> None:
        sessions = machine.bench.gate.paired if machine.bench else None
        for name in crashing:
            machine.sides[name].signal = signal.SIGSEGV if sessions and sessions.started == 2 else 0

    machine.before_process = crash_in_third_session
    gate = machine.gate(out)
    assert gate.timed["throughput/b/seconds"].outcome in NO_REGRESSION
    assert gate.decision is decision, gate.findings
    problem = next(f for f in gate.findings if f.label == "PROBLEM")
    assert (problem.decision, bool(problem.adopted), bool(problem.candidate)) == (
        decision,
        "adopted" in crashing,
        "candidate" in crashing,
    )


def test_second_compile_cache_is_filled_once_and_alternates(machine: Machine, out: Path) -> None:
    made = machine.prepare(out)
    for name, spec in made.environments.items():
        made.environments[name] = replace(spec, more=(machine.caches(f"{name} 2"),))
    used: list[str] = []
    original = pairing.run_duet

    def run_duet(calls: Sequence[LaneCall], flip: bool, timeout: float) -> list[LaneRun]:
        used.extend(call.environment["CACHE"] for call in calls)
        return original(calls, flip, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "run_duet", run_duet)
        made.run()
    assert used[:8] == [
        "adopted",
        "candidate",
        "adopted 2",
        "candidate 2",
        "adopted",
        "candidate",
        "adopted 2",
        "candidate 2",
    ]
    assert made.gate.paired
    assert made.gate.paired.warm
    assert made.gate.paired.caches["throughput/b/seconds"][:4] == [0, 1, 0, 1]
    assert [p for p in machine.processes if p.startswith("timed:")][:2] == [
        "timed:adopted",
        "timed:candidate",
    ]
    assert (out / "output.txt").read_text().count("compile cache 2 filled") == 2
    assert made.gate.decision is Decision.ADOPT, made.gate.findings


def test_spent_budget_leaves_open_rows_inconclusive(machine: Machine, out: Path) -> None:
    gate = machine.gate(out, deadline=0.0)
    assert labels(gate) == [("UNKNOWN", "INCONCLUSIVE")]
    assert not any(p.startswith("timed:") for p in machine.processes)
    assert "the budget is spent" in (out / "output.txt").read_text()
    assert gate.undecided

    resumed = machine.gate(out)
    assert (resumed.decision, resumed.undecided, resumed.finished) == (Decision.ADOPT, False, True)
    steps = [p for p in machine.processes if not p.startswith("timed:")]
    assert len(steps) == len(set(steps)), "canaries and lanes run once"


class Killed(BaseException):
    """Simulates a kill: no handler of the gate catches it."""


@pytest.mark.parametrize("slower", [1.0, 1.05])
def test_gate_killed_and_resumed_gives_the_same_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    def one(name: str) -> Machine:
        machine = Machine(tmp_path / name)
        machine.sides["candidate"].slower = {"throughput/b/seconds": slower}
        attach(machine, monkeypatch)
        return machine

    def what(gate: Gate) -> tuple[object, ...]:
        assert gate.paired
        return gate.decision, gate.findings, gate.timed, gate.paired.log_ratios

    whole_machine = one("whole")
    whole = what(whole_machine.gate(tmp_path / "whole-out"))
    processes = len(whole_machine.processes)
    for at in range(processes):
        machine, out = one(f"killed{at}"), tmp_path / f"out{at}"

        def kill(machine: Machine = machine, at: int = at) -> None:
            if len(machine.processes) == at:
                raise Killed

        machine.before_process = kill
        with pytest.raises(Killed):
            machine.gate(out)
        again = one(f"again{at}")
        again.cache_folder = machine.cache_folder
        assert what(again.gate(out)) == whole, at
        lost = len(machine.processes) + len(again.processes) - processes
        assert 0 <= lost <= 1, "at most the running session is repeated"


def test_anchor_sessions_survive_a_resume(machine: Machine, out: Path) -> None:
    options = GateConfig("cpu", candidate="torch==2.14.0", anchor="torch==2.12.0")

    def kill() -> None:
        drifted = machine.bench and machine.bench.gate.drifted
        if drifted and drifted.started == 3:
            raise Killed

    machine.before_process = kill
    with pytest.raises(Killed):
        machine.gate(out, options)
    before = json.loads((out / state.NAME).read_text())["anchor"]["log_ratios"]
    assert [len(x) for x in before.values()] == [3]
    machine.before_process, machine.processes = lambda: None, []
    gate = machine.gate(out, options)
    assert gate.drifted
    assert {row: x[:3] for row, x in gate.drifted.log_ratios.items()} == before
    assert machine.processes.count("timed:anchor") == drift.SESSIONS - 3


def test_refused_selection_leaves_no_gate_file(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        refused = [call.selection != [CANARIES] for call in calls]
        return [
            replace(run, code=USAGE, failure="no such option") if no else run
            for run, no in zip(machine.run_lanes(calls, timeout), refused)
        ]

    monkeypatch.setattr(runner, "run_lanes", refuse)
    with pytest.raises(GateError, match="pytest rejects the selection: no such option"):
        machine.gate(out)
    assert not (out / state.NAME).exists()


def test_resumed_gate_refuses_other_packages(machine: Machine, out: Path) -> None:
    def kill() -> None:
        raise Killed

    machine.before_process = kill
    with pytest.raises(Killed):
        machine.gate(out)
    machine.sides["candidate"].torch = "2.15.0"
    with pytest.raises(GateError, match=r"candidate packages differ from before \(torch 2.14.0 -> 2.15.0\)"):
        machine.gate(out)


def test_resumed_gate_refuses_another_build_of_a_wheel(machine: Machine, out: Path) -> None:
    """One version of a kernel wheel may be built for several versions of torch."""

    def kill() -> None:
        raise Killed

    machine.before_process = kill
    for content, error in (("aaaa", Killed), ("aaaa", Killed), ("bbbb", GateError)):
        bench = machine.prepare(out)
        bench.environments["candidate"] = replace(bench.environments["candidate"], wheels={"fast": content})
        with pytest.raises(error) as caught:
            bench.run()
    assert "candidate packages differ from before (fast aaaa -> bbbb)" in str(caught.value)
    assert bench.gate.sides["candidate"].wheels == {"fast": "aaaa"}


@pytest.mark.parametrize("text", ["", "{}", '{"config": 3}', "[]"])
def test_invalid_gate_file_is_one_line(out: Path, text: str) -> None:
    out.mkdir()
    (out / state.NAME).write_text(text)
    with pytest.raises(GateError, match="not a gate that can be resumed"):
        state.read(out, SessionPlan())


@planted("C37", "a gate resumed on another class of host")
def test_resumed_gate_refuses_another_host_class(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine.prepare(out)
    made.enter()
    monkeypatch.setattr(measure, "host_class", lambda: "EPYC, 16 cores")
    with pytest.raises(
        GateError, match=r"started on .*, and this is EPYC, 16 cores: gate again, in another --out"
    ):
        machine.gate(out)


# `bumpgate gate` end to end on a miniature tree: real processes, real interpreters, and every failure mode.


pytestmark = pytest.mark.long(40)


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    made = Tree(tmp_path)
    yield made
    made.end()


def test_slower_row_is_found_after_interrupt_and_kill(tree: Tree) -> None:
    """5 % more work in one of two loops: HOLD for that one alone, from sessions of three gates.

    With a user's number of sessions: with 8, each must detect it, and with a busy neighbour one may not. Such a
    neighbour also makes the unchanged loop's ratios too wide for SAME; NOT SLOWER is then its true outcome.
    """
    tree.candidate = tree.interpreter("candidate", SLOWER="1.05")

    def sessions() -> int:
        return (
            (tree.raw()["sessions"] or {"started": 0})["started"]
            if (tree.root / "g" / state.NAME).exists()
            else 0
        )

    def begin(*more: str) -> subprocess.Popen[str]:
        return tree.start("-c", "from bumpgate.cli import main; main()", *tree.sides(), *more)

    first = begin()
    wait_for(lambda: sessions() >= 2)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == gate.INTERRUPTED
    message = err.splitlines()[-1]
    assert message.startswith("interrupted; results so far are saved. Resume with: bumpgate gate")
    assert message.endswith("--resume")
    kept = tree.raw()["sessions"]["log_ratios"]

    again = tree.gate()
    assert (again.code, len(again.err.splitlines())) == (4, 1)
    assert "continue it with --resume, or name another --out" in again.err
    other = tree.gate("--sessions", "9", "--resume")
    assert (other.code, "is of another gate (other sessions)" in other.err) == (4, True)

    before = sessions()
    second = begin("--resume")
    wait_for(lambda: sessions() >= before + 1)
    second.kill()
    second.communicate(timeout=120)
    assert tree.raw()["decision"] == "UNKNOWN"

    last = tree.gate("--resume")
    assert last.code == 1, last.out + last.err
    raw = tree.raw()
    outcomes = {row: t["outcome"] for row, t in raw["timed"].items()}
    assert outcomes.pop("throughput/same/ratio") in {"SAME", "NOT SLOWER"}
    assert outcomes == {"throughput/slow/ratio": "SLOWER"}
    assert raw["timed"]["throughput/slow/ratio"]["ratio"] == pytest.approx(1.05, abs=0.02)
    for row in TIMED:
        found = raw["timed"][row]["log_ratios"]
        assert found[: len(kept[row])] == kept[row], "earlier sessions are kept"
    # A row that lost a reading lags; the sessions end at the look that decides the last row, or, if a process was slow,
    # as soon as a slow mode is excluded.
    counts = {len(raw["timed"][row]["log_ratios"]) for row in TIMED}
    disturbed = any(any(raw["timed"][row]["slow"]) for row in TIMED)
    assert disturbed or counts & {look.sessions for look in SessionPlan().looks}
    assert [f["label"] for f in raw["findings"]] == ["SLOWER"]
    assert f"-> {tree.candidate} -m pytest -m cpu -n 0 '{TIMES_TEST}'" in last.out
    assert "(candidate) against torch" in last.out.splitlines()[-1]
    finished = tree.gate("--resume")
    old = f"; an earlier verdict, started {raw['started']}; nothing was measured now"
    assert finished.code == 1
    assert finished.out.replace(old, "") == last.out != finished.out, (
        "a finished gate shows its verdict again"
    )


def test_unchanged_pair_is_adopted_with_separate_caches(tree: Tree) -> None:
    body = """
    @lanes("cpu")
    def test_caches(lane):
        with open(f"caches-{os.environ['SIDE']}", "w") as f:
            f.write(os.environ["TORCHINDUCTOR_CACHE_DIR"] + " " + os.environ["TRITON_CACHE_DIR"])
            if not sys.dont_write_bytecode:  # the shell forbids it; of two interpreters, one may have its own
                f.write(" " + sys.pycache_prefix)
    """
    tree.tests("import sys\n" + textwrap.dedent(body), "suites/compile/test_caches.py")
    for side in ("adopted", "candidate"):
        tree.interpreter(side, bytecode={})
    done = tree.gate(*COUNTS)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1].startswith("ADOPT: ")
    adopted, candidate = (
        set((tree.root / f"caches-{side}").read_text().split()) for side in ("adopted", "candidate")
    )
    assert len(adopted | candidate) == 6
    assert all(path.startswith(str(tree.root / "home" / "compiled")) for path in adopted | candidate)
    quiet = [line for line in done.err.splitlines() if line]
    assert len(quiet) == 8, "one line per step without a terminal"


FAILURES = {
    "canary": ({"CANARY": "read 0"}, 125, "INSTRUMENT instrument graphs: read 0"),
    "raises": (
        {"TORCH": "raise ImportError('libcudart.so.13: gone')"},
        125,
        "ImportError: libcudart.so.13: gone",
    ),
    "segfault": ({"TORCH": "os.kill(os.getpid(), 11)"}, 125, "import torch: killed by SIGSEGV"),
    "changed": ({"BREAKS": "14"}, 1, "REGRESSION graph_breaks"),
    "lost": ({"BREAKS": "none"}, 1, "MISSING"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_broken_candidate_is_one_finding_with_exit_code(tree: Tree, name: str) -> None:
    variables, code, words = FAILURES[name]
    quoted = {k: v.replace("'", '"') for k, v in variables.items()}
    tree.candidate = tree.interpreter("candidate", **quoted)
    tree.write("torch/__init__.py", "import os\nexec(os.environ.get('TORCH', ''))\n")
    tree.tests(
        GOOD.replace("    row.count(", "    if os.environ.get('BREAKS') != 'none': row.count(").replace(
            "13, expected", "int(os.environ.get('BREAKS', '13')), expected"
        )
    )
    done = tree.gate(*COUNTS)
    assert done.code == code, done.out + done.err
    assert words in done.out
    assert "Traceback" not in done.out + done.err
    assert (tree.raw()["exit_code"], tree.raw()["finished"]) == (code, True)


LOSSES = """
import pytest
ADOPTED = os.environ["SIDE"] == "adopted"

@pytest.mark.parametrize("op", ["add", "mul"] if ADOPTED else ["add"])
@lanes("cpu")
def test_op(lane, op):
    pass

if ADOPTED:
    @lanes("cpu")
    def test_feature(lane):
        pass

@lanes("cpu")
def test_expected_to_fail(lane):
    if not ADOPTED:
        pytest.xfail("not on this torch")
"""
PLAIN = '@lanes("cpu")\ndef test_plain(lane):\n    pass\n'


def test_tests_without_rows_that_the_candidate_loses_hold_it(tree: Tree) -> None:
    """By a parameter, a condition around a test, xfail, collect_ignore and a plugin of the candidate's environment."""
    tree.tests(LOSSES, "suites/compile/test_losses.py")
    tree.tests(PLAIN, "suites/compile/test_ignored.py")
    tree.tests(PLAIN, "suites/compile/test_dropped.py")
    tree.write(
        "suites/compile/conftest.py",
        "import os\ncollect_ignore = [] if os.environ['SIDE'] == 'adopted' else ['test_ignored.py']\n",
    )
    drop = "def pytest_collection_modifyitems(items):\n    items[:] = [i for i in items if 'dropped' not in i.nodeid]\n"
    tree.write("candidate/site/dropping.py", drop)
    python = tree.root / "candidate/python"
    python.write_text(python.read_text().replace("PYTEST_PLUGINS=", "PYTEST_PLUGINS=dropping,"))
    done = tree.gate(*COUNTS)
    assert done.code == 1, done.out + done.err
    lost = {
        test: f["label"] for f in tree.raw()["findings"] for test in f["tests"] if f["decision"] == "HOLD"
    }
    names = {"losses.py::test_op[mul-cpu]", "losses.py::test_op[cpu-mul]", "losses.py::test_feature[cpu]"}
    names |= {
        "losses.py::test_expected_to_fail[cpu]",
        "ignored.py::test_plain[cpu]",
        "dropped.py::test_plain[cpu]",
    }
    assert {test.removeprefix("suites/compile/test_") for test in lost} <= names
    assert (len(lost), {*lost.values()}) == (5, {"MISSING"})


PAIR = ("gate", "--lane", "cpu", "--python-candidate", sys.executable)
REFUSALS = {
    "unknown lane 'tpu'; lanes: cpu, h100, h200, h200x2, v6e": (
        "gate",
        "--lane",
        "tpu",
        "--candidate",
        "torch==1",
    ),
    "name the candidate: --candidate 'torch==X'": ("gate", "--lane", "cpu"),
    "or --python-candidate PATH": (*PAIR, "--candidate", "torch==1"),
    "name the candidate: --candidate 'torch==X', or --python-candidate PATH": (
        # The former names of the options are still read.
        *("gate", "--lane", "cpu", "--python-bad", sys.executable, "--candidate", "torch==1"),
    ),
    "--adopted cannot be combined with an interpreter": (
        *(*PAIR, "--python-good", sys.executable, "--adopted", "torch==1"),
    ),
    "/none: no such interpreter": ("gate", "--lane", "cpu", "--python-candidate", "/none"),
    "--without is for interpreters (--python-candidate PATH)": (
        *("gate", "--lane", "cpu", "--candidate", "torch==1", "--without", "fast"),
    ),
    "--without fast: not a kernel wheel of lane cpu (none)": (*PAIR, "--without", "fast"),
    "--adopted cannot be combined with an interpreter for it": (
        *PAIR,
        "--python-adopted",
        sys.executable,
        "--adopted",
        "torch==1",
    ),
    "the selection names suites/nope.py, which does not exist": (*PAIR, "--", "suites/nope.py::test_a"),
    "--fast and the anchor torch==1: a fast gate": (*PAIR, "--fast", "--anchor", "torch==1"),
    "-m is set by the gate": (*PAIR, "--", "-m", "h200"),
    "--record is set by the gate": (*PAIR, "--", "--record=x"),
    "--out . holds sources of the work tree (conftest.py)": (*PAIR, "--out", "."),
    "--out suites/compile holds sources of the work tree": (*PAIR, "--out", "suites/compile"),
    "--budget: must be a number of minutes of at least 0, got nan": (*PAIR, "--budget", "nan"),
    "--sessions: at least 6 sessions, got 3": (*PAIR, "--sessions", "3"),
    "--command: the command is empty": (*PAIR, "--command", " "),
    "invalid candidate 'torch=>1'": ("gate", "--lane", "cpu", "--candidate", "torch=>1"),
    "names no package: --candidate torch==2.14.1": ("gate", "--lane", "cpu", "--candidate", "2.14.1"),
    "--candidate x/torch-1.whl: no such file": ("gate", "--lane", "cpu", "--candidate", "x/torch-1.whl"),
    "its marker excludes this Python": (
        *("gate", "--lane", "cpu", "--candidate", "torch==1; python_version < '3'"),
    ),
    "must be a URL such as https://HOST/index": (
        *("gate", "--lane", "cpu", "--candidate", "torch==1", "--index", "/nowhere"),
    ),
}


FAST = {"version": "1.0", "torch": "9.9.0"}


def kernel_lane(tree: Tree) -> None:
    write_lane(tree.root, "cpu", wheels={"fast": FAST, "faster": FAST})


@pytest.fixture
def run(tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tree.root)
    for name in ("BUMPGATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, tree.env[name])
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bumpgate", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_gate_input_is_one_line_and_exit_4(run: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Before any wait for the device."""
    monkeypatch.setattr("bumpgate.gate.command.device_lock", lambda *_: pytest.fail("waited for the device"))
    code, out, err = run(*REFUSALS[words])
    assert (code, out, len(err.splitlines())) == (4, "", 1), err
    assert words in err


def test_folder_of_a_refused_gate_is_used_again(run: Any, tree: Tree) -> None:
    """pytest rejects the selection after the canaries have written their records."""
    tree.write("g/canaries-adopted.json", "{}")
    code, _, err = run(*PAIR, "--out", "g", "--resume", "--", "suites/canaries", "--no-such-option")
    assert code == 4
    assert "pytest rejects the selection: unrecognized arguments: --no-such-option" in err


@planted("C39", "an interpreter that was prepared without the lane's kernel wheels")
def test_interpreter_without_kernel_wheels_is_refused(run: Any, tree: Tree) -> None:
    kernel_lane(tree)
    code, out, err = run(*tree.sides())
    assert (code, out) == (4, "")
    assert err.splitlines() == [
        f"bumpgate: {tree.adopted} lacks fast, faster of lane cpu: install them (bumpgate wheels plan --lane cpu"
        f" --python {tree.adopted} lists which fit), or add, if that is intended: --without fast --without faster"
    ]
    assert not (tree.root / "g" / state.NAME).exists()
    code, _, err = run(*tree.sides(), "--without", "fast")
    assert (code, "lacks faster of lane cpu" in err) == (4, True)


def test_kernel_wheels_named_with_without_are_not_required(
    run: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_lane(tree)
    places: dict[str, EnvSpec] = {}

    class StopGateError(BaseException):
        pass

    def stop(bench: Bench, _: Gate) -> None:
        places.update(bench.environments)
        assert bench.config.without == ("fast", "faster")
        raise StopGateError

    monkeypatch.setattr(gate, "run_gate", stop)
    monkeypatch.setattr("sys.argv", ["bumpgate", *tree.sides(), "--without", "Fast", "--without", "faster"])
    with pytest.raises(StopGateError):
        cli.main()
    absent = json.loads(places["candidate"].variables["BUMPGATE_ABSENT"])
    assert absent["fast"] == "fast is not installed (--without)"


@pytest.mark.parametrize("error", [NotInstallable, BuildError])
def test_environment_that_cannot_be_built_is_unknown(
    run: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch, error: type[BuildError]
) -> None:
    def refuse(request: object, **_: object) -> None:
        raise error("torch==99: there is no version of torch==99 (log: build.log)", Path("build.log"), "tail")

    monkeypatch.setattr(environments, "build", refuse)
    monkeypatch.setattr(environments, "lane_request", lambda *_, **__: None)
    code, out, _ = run(
        "gate", "--lane", "cpu", "--python-adopted", str(tree.adopted), "--candidate", "torch==99", *COUNTS
    )
    assert code == 125
    assert "INFRA torch==99: there is no version of torch==99" in out
    assert "-> less build.log" in out
    place = tree.root / "build/gate/cpu-torch-99" / state.NAME
    assert json.loads(place.read_text())["decision"] == "UNKNOWN"


def test_full_disk_is_one_line_and_keeps_measurements(
    run: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = state.write_atomic, []

    def full(path: Path, text: str) -> None:
        written.append(text)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(state, "write_atomic", full)
    code, out, err = run(*tree.sides(), *COUNTS)
    assert (code, out) == (125, "")
    assert "gate.json: No space left on device; results so far are saved. Resume with: bumpgate gate" in err
    assert "--out g --resume -- suites/canaries suites/compile" in err
    kept = state.read(tree.root / "g", SessionPlan())
    assert kept
    assert (kept.finished, kept.sides["adopted"].canaries, kept.sides["candidate"].canaries) == (
        False,
        {},
        {},
    )


def test_second_gate_reports_the_process_it_waits_for(tree: Tree) -> None:
    with (tree.root / f"bumpgate-{os.getuid()}.gate-cpu").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        log = tree.root / "stderr"
        program = "import sys; sys.stderr = open('stderr', 'w', 1); from bumpgate.cli import main; main()"
        second = tree.start("-c", program, *tree.sides())
        wait_for(lambda: log.exists() and "waiting" in log.read_text())
        assert log.read_text() == "device cpu is in use by process 4711; waiting for it\n"
        assert not (tree.root / "g" / state.NAME).exists()
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=120)
    assert second.returncode == gate.INTERRUPTED


def test_gate_help_lists_exit_codes(run: Any) -> None:
    code, out, _ = run("gate", "--help")
    assert code == 0
    assert re.search(r"0 ADOPT, 1 HOLD, 125 UNKNOWN, 4 bad input", " ".join(out.split()))


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ("libtpu==0.0.50", "libtpu 0.0.51 (adopted)"),
        ("Torch_XLA >= 2.9", "torch-xla 2.9.0 (adopted)"),
        ("torch==2.9.0", "torch 2.9.1 (adopted)"),
        ("triton==3.6.0", "torch 2.9.1 (adopted)"),  # absent
        ("adopted", "torch 2.9.1 (adopted)"),
        ("/wheels/libtpu-0.0.50-py3-none-any.whl", "torch 2.9.1 (adopted)"),
    ],
)
def test_side_is_named_after_the_package_of_the_candidate(candidate: str, expected: str) -> None:
    packages = {"torch": "2.9.1", "torch-xla": "2.9.0", "libtpu": "0.0.51"}
    assert side_name("adopted", candidate, packages) == expected
    assert side_name("adopted", candidate, {}) == "adopted"


def test_resume_refuses_another_build_of_one_version(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that is built again from another commit keeps its version, such as 2.15.0a0."""
    commit = {"torch": "a" * 40}
    monkeypatch.setattr(
        measure, "installed", lambda python, *_: Installed({"torch": "2.15.0a0"}, dict(commit))
    )
    config = GateConfig("cpu", python_candidate="/envs/candidate")
    made = machine.prepare(tmp_path / "gate", config)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    commit["torch"] = "b" * 40
    with pytest.raises(
        options.GateError, match=r"packages differ from before .torch a{40} -> b{40}.: gate again"
    ):
        machine.gate(tmp_path / "gate", config)
