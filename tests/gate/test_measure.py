"""What a gate measures, in which order, and its verdict; each fault is injected in one side of a machine.

The machine of tests/support/gating.py runs no process. The second half drives the command with real ones.
"""

from __future__ import annotations

import errno
import fcntl
import html
import json
import math
import os
import re
import shlex
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
from bumpgate.core.findings import NO_REGRESSION, Decision, Finding
from bumpgate.core.rows import Verdict, read_record
from bumpgate.env.build import BuildError, NotInstallable
from bumpgate.env.request import Request
from bumpgate.gate import command as gate
from bumpgate.gate import drift, environments, measure, pairing, runner, state
from bumpgate.gate.environments import EnvSpec, side_name
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate, GateConfig, GateError
from bumpgate.gate.timed import MAX_EMPTY_SESSIONS, SIDE
from bumpgate.process.runner import USAGE, Installed, LaneCall, LaneRun
from bumpgate.report import markdown, page
from bumpgate.report.html_page import html_page
from suites.support.planted import planted
from tests.support.gate_tree import COUNTS, TIMED, TIMES_TEST, Tree
from tests.support.gating import (
    COUNT_TEST,
    TIME_ROW,
    TIME_TEST,
    Machine,
    attach,
    count,
    gone,
    labels,
    written,
)
from tests.support.lane_files import write_lane
from tests.support.project import GOOD, wait_for
from tests.support.tree import CANARIES

pytestmark = pytest.mark.long(40)
WITH_ANCHOR = GateConfig("cpu", candidate="torch==2.14.0", anchor="torch==2.12.0")


def test_unchanged_pair_is_adopted(machine: Machine, out: Path) -> None:
    gate = machine.gate(out)
    assert (gate.decision, gate.findings, gate.finished) == (Decision.ADOPT, (), True)
    steps = [f"{step}:{side}" for step in (CANARIES, "all", "timed") for side in ("adopted", "candidate")]
    assert list(dict.fromkeys(machine.processes)) == steps
    assert machine.processes[4:8] == ["timed:adopted", "timed:candidate"] * 2


def test_sides_that_share_a_gpu_take_turns(machine: Machine, out: Path) -> None:
    machine.gate(out, GateConfig("h200", candidate="torch==2.14.0"))
    assert machine.processes[2:4] == ["all:adopted", "all:candidate"]
    assert machine.processes[4:12] == [f"timed:{SIDE[letter]}" for letter in "ABBABAAB"]


def test_gate_saves_every_step_before_the_next(machine: Machine, out: Path) -> None:
    seen = []

    def look() -> None:
        raw = json.loads((out / state.NAME).read_text())
        assert (raw["decision"], raw["exit_code"], raw["finished"]) == ("UNKNOWN", 125, False)
        done = [(s["canaries"] is not None) + s["measured"] for s in raw["sides"].values()]
        seen.append((*done, (raw["sessions"] or {"started": 0})["started"]))

    machine.before_process = look
    machine.gate(out)
    # Both sides of a step run concurrently.
    assert seen[:5] == [(0, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 0), (2, 2, 0)]
    assert [s[2] for s in seen[4:]] == [i // 2 for i in range(len(seen[4:]))]
    raw = json.loads((out / state.NAME).read_text())
    assert (raw["decision"], raw["exit_code"], raw["finished"]) == ("ADOPT", 0, True)


def test_slower_row_is_held_and_read_from_the_written_gate(machine: Machine, out: Path) -> None:
    machine.plant("candidate", slower={TIME_ROW: 1.05})
    gate = machine.gate(out, WITH_ANCHOR)
    assert labels(gate) == [("HOLD", "SLOWER")]
    line = f"/envs/candidate -m pytest -p bumpgate.plugin --rootdir=. -m cpu -n 0 '{TIME_TEST}'"
    assert gate.findings[0].repro.endswith(f" {line}")
    assert gate.timed[TIME_ROW].interval[0] > 1.01
    found = written(out)
    assert (found.decision, found.findings) == (Decision.HOLD, gate.findings)
    paired = found.timed[TIME_ROW]
    assert (paired.outcome, paired.sessions) == ("SLOWER", len(paired.log_ratios))
    assert paired.ratio == pytest.approx(1.05, rel=0.03)
    assert found.adopted.record == read_record(out / "adopted.json")
    assert found.readings[TIME_ROW] == pytest.approx(math.log(1.05), abs=0.03)


def test_gate_lists_every_package_that_moved(machine: Machine, out: Path) -> None:
    machine.plant("adopted", packages={"triton": "3.7.1", "numpy": "2.4.6", "filelock": "3.0"})
    machine.plant("candidate", packages={"triton": "3.8.0", "numpy": "2.4.6", "nvidia-nccl": "2.30"})
    machine.gate(out)
    moved = ("filelock 3.0 -> (absent)", "nvidia-nccl (absent) -> 2.30", "torch 2.13.0 -> 2.14.0")
    moved += ("triton 3.7.1 -> 3.8.0",)
    found = written(out)
    assert found.moved == moved
    printed = [line for line in (out / "output.txt").read_text().splitlines() if line.startswith("moved: ")]
    assert printed == [f"moved: {line}" for line in moved]
    shown = page.of(found)
    assert "4 packages moved" in markdown.summary(shown)
    for form in (html_page(shown), markdown.summary(shown)):
        assert all(line in form or html.escape(line) in form for line in moved)


# Fault of one side -> decision and label if it is of the candidate, and the decision if it is of the adopted build.
FAULTS = {
    "a changed exact row": ({"counts": [count(14, Verdict.CHANGED)]}, "HOLD", "CHANGED", "ADOPT"),
    "a lost row": ({"counts": [gone()]}, "HOLD", "MISSING", "UNKNOWN"),
    "a lost row in a cut run": ({"counts": [gone()], "complete": False}, "UNKNOWN", "MISSING", "UNKNOWN"),
    "a failed test": ({"problems": (f"{COUNT_TEST}: assert 1 == 2",)}, "HOLD", "PROBLEM", "UNKNOWN"),
    "a canary that disagrees": ({"canaries": {"graphs": "read 0"}}, "UNKNOWN", "INSTRUMENT", "UNKNOWN"),
    "a broken instrument": ({"counts": [count(13, Verdict.INSTRUMENT)]}, "UNKNOWN", "INSTRUMENT", "UNKNOWN"),
    "a failed import": ({"failure": "import torch: exit 1"}, "UNKNOWN", "INFRA", "UNKNOWN"),
    "crashes in sessions": ({"signal": signal.SIGSEGV, "dies_from": 3}, "HOLD", "PROBLEM", "UNKNOWN"),
    "a kill from outside": ({"signal": signal.SIGKILL}, "HOLD", "LOST", "UNKNOWN"),
    "a timed row lost for good": ({"spoiled": 1000}, "HOLD", "LOST", "UNKNOWN"),
    "an unreviewed one": ({"spoiled": 1000, "unreviewed": True}, "HOLD", "LOST", "UNKNOWN"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_counts_against_the_candidate_alone(machine: Machine, out: Path, fault: str) -> None:
    """In the adopted build it is a gap or a fix."""
    fields, decision, label, of_adopted = FAULTS[fault]
    machine.plant("candidate", **fields)
    gate = machine.gate(out)
    assert gate.decision.name == decision, gate.findings
    assert label in [found for _, found in labels(gate)]
    machine.plant("candidate", **vars(machine.sides["anchor"]))
    machine.plant("adopted", **fields)
    gate = machine.gate(out.with_name("other"))
    assert gate.decision.name == of_adopted, gate.findings


TIMES_ALONE = ["first answer: only the times can still hold the candidate"]
HOLDS = "first answer: HOLD, whatever the times are (1 finding)"
CUT = ["first answer: UNKNOWN, unless the times hold the candidate (1 finding)", "  INFRA the run"]


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        ({"counts": [count(14, Verdict.CHANGED)]}, [HOLDS, "  CHANGED graph_breaks"]),
        ({"problems": (f"{COUNT_TEST}: assert 1 == 2",)}, [HOLDS, "  PROBLEM assert 1 == 2"]),
        ({"complete": False}, CUT),
        ({"spoiled": 2}, TIMES_ALONE),
        ({"spoiled": 2, "unreviewed": True}, TIMES_ALONE),
        ({"slower": {TIME_ROW: 9.0}}, TIMES_ALONE),
    ],
)
def test_first_answer_precedes_the_sessions(
    machine: Machine, out: Path, fault: dict[str, Any], lines: list[str]
) -> None:
    machine.plant("candidate", **fault)
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


def test_candidate_that_does_not_import_is_not_run(machine: Machine, out: Path) -> None:
    machine.plant("candidate", failure="import torch: killed by SIGSEGV")
    gate = machine.gate(out)
    assert (machine.processes, gate.findings[0].head) == ([], "import torch: killed by SIGSEGV")
    assert json.loads((out / state.NAME).read_text())["moved"] == [], "its packages are unknown"


def test_empty_selection_is_unknown(machine: Machine, out: Path) -> None:
    machine.rows = ()
    machine.plant("adopted", "candidate", counts=[])
    assert labels(machine.gate(out)) == [("UNKNOWN", "NOTHING")]


def test_empty_sessions_end_after_a_limit(machine: Machine, out: Path) -> None:
    machine.plant("candidate", signal=signal.SIGABRT)
    gate = machine.gate(out)
    assert gate.paired
    assert (gate.paired.started, gate.paired.open_rows()) == (MAX_EMPTY_SESSIONS, [])
    assert labels(gate) == [("HOLD", "LOST"), ("HOLD", "PROBLEM"), ("UNKNOWN", "INCONCLUSIVE")]
    lost = [f"{n} timed processes without a reading in 8 sessions" for n in (0, 8)]
    assert [*gate.findings[0].adopted, *gate.findings[0].candidate] == lost
    assert gate.findings[1].candidate[0] == f"{TIME_TEST}: died of SIGABRT (in 8 timed processes, 8 sessions)"


@pytest.mark.parametrize(
    ("crashing", "decision"),
    [("adopted", Decision.ADOPT), ("candidate", Decision.HOLD), ("adopted candidate", Decision.UNKNOWN)],
)
def test_crash_in_one_session_counts_against_the_candidate_alone(
    machine: Machine, out: Path, crashing: str, decision: Decision
) -> None:
    """The later sessions decide the row, so a crash of the adopted build alone is shown and leaves no gap."""

    def crash_in_third_session() -> None:
        sessions = machine.bench.gate.paired if machine.bench else None
        machine.plant(*crashing.split(), signal=signal.SIGSEGV if sessions and sessions.started == 2 else 0)

    machine.before_process = crash_in_third_session
    gate = machine.gate(out)
    assert gate.timed[TIME_ROW].outcome in NO_REGRESSION
    assert gate.decision is decision, gate.findings
    problem = next(f for f in gate.findings if f.label == "PROBLEM")
    shown = " ".join(side for side in ("adopted", "candidate") if getattr(problem, side))
    assert (problem.decision, shown) == (decision, crashing)


def test_second_compile_cache_is_filled_once_and_alternates(machine: Machine, out: Path) -> None:
    made = machine.prepare(out)
    for name, spec in made.environments.items():
        made.environments[name] = replace(spec, more=(machine.caches(f"{name} 2"),))
    used: list[str] = []

    def run_duet(calls: Sequence[LaneCall], flip: bool, timeout: float) -> list[LaneRun]:
        used.extend(call.environment["CACHE"] for call in calls)
        return machine.run_lanes(calls, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "run_duet", run_duet)
        made.run()
    assert used[:8] == ["adopted", "candidate", "adopted 2", "candidate 2"] * 2
    assert made.gate.paired
    assert made.gate.paired.warm
    assert made.gate.paired.caches[TIME_ROW][:4] == [0, 1, 0, 1]
    timed = [step for step in machine.processes if step.startswith("timed:")]
    assert timed[:2] == ["timed:adopted", "timed:candidate"]
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


def test_gate_killed_and_resumed_gives_the_same_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its processes."""

    def one(name: str) -> Machine:
        machine = Machine(tmp_path / name)
        machine.plant("candidate", slower={TIME_ROW: 1.05})
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
        machine.kill(out, when=lambda machine=machine, at=at: len(machine.processes) == at)
        again = one(f"again{at}")
        again.cache_folder = machine.cache_folder
        assert what(again.gate(out)) == whole, at
        lost = len(machine.processes) + len(again.processes) - processes
        assert 0 <= lost <= 1, "at most the running session is repeated"


def test_anchor_sessions_survive_a_resume(machine: Machine, out: Path) -> None:
    def third() -> bool:
        drifted = machine.bench and machine.bench.gate.drifted
        return bool(drifted and drifted.started == 3)

    machine.kill(out, WITH_ANCHOR, third)
    before = json.loads((out / state.NAME).read_text())["anchor"]["log_ratios"]
    assert [len(x) for x in before.values()] == [3]
    machine.processes.clear()
    gate = machine.gate(out, WITH_ANCHOR)
    assert gate.drifted
    assert {row: x[:3] for row, x in gate.drifted.log_ratios.items()} == before
    assert machine.processes.count("timed:anchor") == drift.SESSIONS - 3


def test_refused_selection_leaves_no_gate_file(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
        code = {"code": USAGE, "failure": "no such option"} if calls[0].selection != [CANARIES] else {}
        return [replace(run, **code) for run in machine.run_lanes(calls, timeout)]

    monkeypatch.setattr(runner, "run_lanes", refuse)
    with pytest.raises(GateError, match="pytest rejects the selection: no such option"):
        machine.gate(out)
    assert not (out / state.NAME).exists()


def other_packages(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    machine.plant("candidate", torch="2.15.0")


def other_build_of_a_wheel(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """One version of a kernel wheel may be built for several versions of torch."""
    assert machine.bench
    prepare, spec = machine.prepare, machine.bench.environments["candidate"]

    def prepared(*given: Any, **options: Any) -> Any:
        made = prepare(*given, **options)
        made.environments["candidate"] = replace(spec, wheels={"fast": "bbbb"})
        return made

    patch.setattr(machine, "prepare", prepared)


def other_build_of_torch(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """A torch that is built again from another commit keeps its version, such as 2.15.0a0."""
    patch.setattr(measure, "installed", lambda python, *_: Installed({"torch": TORCH}, {"torch": "b" * 40}))


TORCH = "2.15.0a0"
RESUMED = [
    (other_packages, r"candidate packages differ from before \(torch 2.15.0a0 -> 2.15.0\)"),
    (other_build_of_a_wheel, r"candidate packages differ from before \(fast aaaa -> bbbb\)"),
    (other_build_of_torch, r"packages differ from before \(torch a{40} -> b{40}\): gate again"),
]


@pytest.mark.parametrize(("change", "words"), RESUMED, ids=lambda given: getattr(given, "__name__", ""))
def test_resumed_gate_refuses_another_environment(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    installed = lambda *given: Installed({**machine.installed(*given).packages}, {"torch": "a" * 40})  # noqa: E731
    monkeypatch.setattr(measure, "installed", installed)
    machine.plant("adopted", "candidate", torch=TORCH)
    made = machine.prepare(out)
    made.environments["candidate"] = replace(made.environments["candidate"], wheels={"fast": "aaaa"})
    made.enter()
    made.enter()  # the same again
    change(machine, monkeypatch)
    with pytest.raises(GateError, match=words):
        machine.gate(out)
    assert made.gate.sides["candidate"].wheels == {"fast": "aaaa"}


@planted("C37", "a gate resumed on another class of host")
def test_resumed_gate_refuses_another_host_class(
    machine: Machine, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.prepare(out).enter()
    monkeypatch.setattr(measure, "host_class", lambda: "EPYC, 16 cores")
    words = r"started on .*, and this is EPYC, 16 cores: gate again, in another --out"
    with pytest.raises(GateError, match=words):
        machine.gate(out)


@pytest.mark.parametrize("text", ["", "{}", '{"config": 3}', "[]"])
def test_invalid_gate_file_is_one_line(out: Path, text: str) -> None:
    out.mkdir()
    (out / state.NAME).write_text(text)
    with pytest.raises(GateError, match="not a gate that can be resumed"):
        state.read(out, SessionPlan())


# `bumpgate gate` end to end on a miniature tree: real processes, real interpreters.


def test_slower_row_is_found_after_interrupt_and_kill(tree: Tree) -> None:
    """5 % more work in one of two loops: HOLD for that one alone, from sessions of three gates."""
    tree.candidate = tree.interpreter("candidate", SLOWER="1.05")

    def sessions() -> int:
        found = (tree.root / "g" / state.NAME).exists() and tree.raw()["sessions"]
        return int(found["started"]) if found else 0

    def begin(*more: str) -> subprocess.Popen[str]:
        program = "from bumpgate.cli import main; main()"
        return tree.start("-c", program, *tree.sides(), "--sessions", "8", *more)

    first = begin()
    wait_for(lambda: sessions() >= 2)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == gate.INTERRUPTED
    message = err.splitlines()[-1]
    assert message.startswith("interrupted; results so far are saved. Resume with: bumpgate gate")
    assert message.endswith("--resume")
    kept = tree.raw()["sessions"]["log_ratios"]

    again = tree.gate("--sessions", "8")
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

    last = tree.gate("--sessions", "8", "--resume")
    assert last.code == 1, last.out + last.err
    raw = tree.raw()
    outcomes = {row: t["outcome"] for row, t in raw["timed"].items()}
    assert outcomes == {"throughput/same/ratio": "SAME", "throughput/slow/ratio": "SLOWER"}
    assert raw["timed"]["throughput/slow/ratio"]["ratio"] == pytest.approx(1.05, abs=0.004)
    for row in TIMED:
        found = raw["timed"][row]["log_ratios"]
        assert found[: len(kept[row])] == kept[row], "earlier sessions are kept"
    assert [f["label"] for f in raw["findings"]] == ["SLOWER"]
    assert f"-> {tree.candidate} -m pytest -m cpu -n 0 '{TIMES_TEST}'" in last.out
    assert "(candidate) against torch" in last.out.splitlines()[-1]
    finished = tree.gate("--sessions", "8", "--resume")
    old = f"; an earlier verdict, started {raw['started']}; nothing was measured now"
    assert finished.code == 1
    assert finished.out.replace(old, "") == last.out != finished.out, "it shows its verdict again"


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
    texts = [(tree.root / f"caches-{side}").read_text().split() for side in ("adopted", "candidate")]
    assert len({*texts[0], *texts[1]}) == 6
    home = str(tree.root / "home" / "compiled")
    assert all(path.startswith(home) for text in texts for path in text)
    assert len([line for line in done.err.splitlines() if line]) == 8, "one line per step without a terminal"


FAILURES = {
    "raises": ({"TORCH": 'raise ImportError("libcudart.so.13: gone")'}, 125, "ImportError: libcudart.so.13: gone"),
    "segfault": ({"TORCH": "os.kill(os.getpid(), 11)"}, 125, "import torch: killed by SIGSEGV"),
    "changed": ({"BREAKS": "14", "CANARY": "read 0"}, 1, "REGRESSION graph_breaks"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_broken_candidate_is_one_finding_with_exit_code(tree: Tree, name: str) -> None:
    variables, code, words = FAILURES[name]
    tree.candidate = tree.interpreter("candidate", **variables)
    tree.write("torch/__init__.py", "import os\nexec(os.environ.get('TORCH', ''))\n")
    edit = "    open(f'suites/compile/helper_{os.environ[\"SIDE\"]}.py', 'w').close()\n"
    tree.tests(GOOD.replace("13, expected", "int(os.environ.get('BREAKS', '13')), expected") + edit)
    done = tree.gate(*COUNTS)
    assert done.code == code, done.out + done.err
    changed = "the work tree changed while the gate measured (tree: suites/compile/helper_adopted.py, "
    also = ("INSTRUMENT instrument graphs: read 0", f"INFRA {changed}", "-> bumpgate gate --lane cpu")
    for line in (words, *also * ("CANARY" in variables)):
        assert line in done.out
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
    ignore = "import os\ncollect_ignore = [] if os.environ['SIDE'] == 'adopted' else ['test_ignored.py']\n"
    tree.write("suites/compile/conftest.py", ignore)
    drop = "def pytest_collection_modifyitems(items):\n    items[:] = [i for i in items if 'dropped' not in i.nodeid]\n"
    tree.write("candidate/site/dropping.py", drop)
    python = tree.root / "candidate/python"
    python.write_text(python.read_text().replace("PYTEST_PLUGINS=", "PYTEST_PLUGINS=dropping,"))
    done = tree.gate(*COUNTS)
    assert done.code == 1, done.out + done.err
    held = [f for f in tree.raw()["findings"] if f["decision"] == "HOLD"]
    lost = {test.removeprefix("suites/compile/test_"): f["label"] for f in held for test in f["tests"]}
    names = {"losses.py::test_op[mul-cpu]", "losses.py::test_op[cpu-mul]", "losses.py::test_feature[cpu]"}
    names |= {
        "losses.py::test_expected_to_fail[cpu]",
        "ignored.py::test_plain[cpu]",
        "dropped.py::test_plain[cpu]",
    }
    assert {*lost} <= names
    assert (len(lost), {*lost.values()}) == (5, {"MISSING"})


TORCH_1 = "--lane cpu --candidate torch==1"
PAIR = f"--lane cpu --python-candidate {sys.executable}"
BOTH = f"{PAIR} --python-adopted {sys.executable}"
# Message -> the arguments that are refused with it.
REFUSALS = {
    "unknown lane 'tpu'; lanes: cpu, h100, h100x4": "--lane tpu --candidate torch==1",
    "name the candidate: --candidate 'torch==X'": "--lane cpu",
    "--base gone: no such commit here": "--lane cpu --base gone",
    "or --python-candidate PATH": f"{PAIR} --candidate torch==1",
    "--adopted cannot be combined with an interpreter for it": f"{BOTH} --adopted torch==1",
    "/none: no such interpreter": "--lane cpu --python-candidate /none",
    "--without is for interpreters (--python-candidate PATH)": f"{TORCH_1} --without fast",
    "--without fast: not a kernel wheel of lane cpu (none)": f"{PAIR} --without fast",
    "the selection names suites/nope.py, which does not exist": f"{PAIR} -- suites/nope.py::test_a",
    "--fast and the anchor torch==1: a fast gate": f"{PAIR} --fast --anchor torch==1",
    "-m is set by the gate": f"{PAIR} -- -m h200",
    "--record is set by the gate": f"{PAIR} -- --record=x",
    "--out . holds sources of the work tree (conftest.py)": f"{PAIR} --out .",
    "--out suites/compile holds sources of the work tree": f"{PAIR} --out suites/compile",
    "--budget: must be a number of minutes of at least 0, got nan": f"{PAIR} --budget nan",
    "--sessions: at least 6 sessions, got 3": f"{PAIR} --sessions 3",
    "--command: the command is empty": f"{PAIR} --command ' '",
    "--command and a pytest selection: use one, not both": f"{PAIR} --command ls -- suites",
    "--gpus 0: lane cpu runs on cpu; leave the option out": f"{PAIR} --gpus 0",
    "invalid candidate 'torch=>1'": "--lane cpu --candidate 'torch=>1'",
    "--candidate x/torch-1.whl: no such file": "--lane cpu --candidate x/torch-1.whl",
    "its marker excludes this Python": "--lane cpu --candidate \"torch==1; python_version < '3'\"",
    "must be a URL such as https://HOST/index": f"{TORCH_1} --index /nowhere",
}


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


@pytest.fixture
def kernel_lane(tree: Tree) -> None:
    """Give the lane two kernel wheels, which no interpreter has."""
    fast = {"version": "1.0", "torch": "9.9.0"}
    write_lane(tree.root, "cpu", wheels={"fast": fast, "faster": fast})


def test_bad_gate_input_is_one_line_and_exit_4(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any wait for the device."""
    monkeypatch.setattr("bumpgate.gate.command.device_lock", lambda *_: pytest.fail("waited for the device"))
    for words, arguments in REFUSALS.items():
        code, out, err = run("gate", *shlex.split(arguments))
        assert (code, out, len(err.splitlines())) == (4, "", 1), (arguments, err)
        assert words in err


@planted("C39", "an interpreter that was prepared without the lane's kernel wheels")
def test_interpreter_without_kernel_wheels_is_refused(run: Any, tree: Tree, kernel_lane: None) -> None:
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
    run: Any, tree: Tree, kernel_lane: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, EnvSpec] = {}

    def stop(bench: Bench, _: Gate) -> None:
        places.update(bench.environments)
        assert bench.config.without == ("fast", "faster")
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "run_gate", stop)
    assert run(*tree.sides(), "--without", "Fast", "--without", "faster")[0] == gate.INTERRUPTED
    absent = json.loads(places["candidate"].variables["BUMPGATE_ABSENT"])
    assert absent["fast"] == "fast is not installed (--without)"


@pytest.mark.parametrize("error", [NotInstallable, BuildError])
def test_environment_that_cannot_be_built_is_unknown(
    run: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch, error: type[BuildError]
) -> None:
    def refuse(request: object, **_: object) -> None:
        raise error("torch==99: there is no version of torch==99 (log: build.log)", Path("build.log"), "tail")

    monkeypatch.setattr(environments, "build", refuse)
    monkeypatch.setattr(
        environments, "lane_request", lambda *_, **__: Request(("torch==99",), python=sys.executable)
    )
    sides = "--lane", "cpu", "--python-adopted", str(tree.adopted), "--candidate", "torch==99"
    code, out, _ = run("gate", *sides, *COUNTS)
    assert code == 125
    assert "INFRA torch==99: there is no version of torch==99" in out
    assert "-> less build.log" in out
    place = tree.root / "build/gate/cpu-torch-99" / state.NAME
    assert json.loads(place.read_text())["decision"] == "UNKNOWN"


def test_full_disk_is_one_line_and_keeps_measurements(
    run: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, saved = state.write_atomic, []

    def full(path: Path, text: str) -> None:
        saved.append(text)
        if len(saved) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(state, "write_atomic", full)
    code, out, err = run(*tree.sides(), *COUNTS)
    assert (code, out) == (125, "")
    assert "gate.json: No space left on device; results so far are saved. Resume with: bumpgate gate" in err
    assert "--out g --resume -- suites/canaries suites/compile" in err
    kept = state.read(tree.root / "g", SessionPlan())
    assert kept
    assert [kept.finished, *(kept.sides[side].canaries for side in ("adopted", "candidate"))] == [
        False,
        {},
        {},
    ]


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
