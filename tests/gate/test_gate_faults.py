"""`bumpgate gate` end to end on a miniature tree: real processes, real interpreters, and every failure mode."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bumpgate import cli
from bumpgate.env.build import BuildError, NotInstallable
from bumpgate.gate import command as gate
from bumpgate.gate import environments, measure, options, state
from bumpgate.gate.environments import EnvSpec, side_name
from bumpgate.gate.options import GateConfig
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate
from bumpgate.process.runner import Installed
from suites.support.planted import planted
from tests.support.gate_tree import COUNTS, TIMED, TIMES_TEST, Tree, wait_for
from tests.support.gating import Machine
from tests.support.lane_files import write_lane
from tests.support.project import GOOD

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
    assert done.out.startswith("ADOPT: ")
    adopted, candidate = (
        set((tree.root / f"caches-{side}").read_text().split()) for side in ("adopted", "candidate")
    )
    assert len(adopted | candidate) == 6
    assert all(path.startswith(str(tree.root / "home" / "compiled")) for path in adopted | candidate)
    quiet = [line for line in done.err.splitlines() if line]
    assert len(quiet) == 7, "one line per step without a terminal"


def test_gate_at_its_budget_resumes_to_the_same_verdict(tree: Tree) -> None:
    ended = tree.gate("--budget", "0")
    assert ended.code == 125, ended.out + ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith("the budget ended before every timed row was decided. Resume with: bumpgate gate")
    assert (line.endswith("--resume"), tree.raw()["sessions"]["started"]) == (True, 0)
    started = tree.raw()["started"]

    resumed = tree.gate("--resume")
    assert resumed.code == 0, resumed.out + resumed.err
    assert "nothing was measured now" not in resumed.out
    assert (tree.raw()["started"], tree.raw()["decision"]) == (started, "ADOPT")
    assert tree.raw()["sessions"]["started"] >= min(look.sessions for look in SessionPlan().looks)


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
        GOOD.replace("    row(", "    if os.environ.get('BREAKS') != 'none': row(").replace(
            "13, expected", "int(os.environ.get('BREAKS', '13')), expected"
        )
    )
    done = tree.gate(*COUNTS)
    assert done.code == code, done.out + done.err
    assert words in done.out
    assert "Traceback" not in done.out + done.err
    assert (tree.raw()["exit_code"], tree.raw()["finished"]) == (code, True)


def test_selection_without_rows_is_unknown(tree: Tree) -> None:
    tree.tests("@lanes('h200')\ndef test_elsewhere(lane):\n    pass\n", "suites/compile/test_h200.py")
    done = tree.gate("--", "suites/compile/test_h200.py")
    assert done.code == 125
    assert "NOTHING no row was selected" in done.out


PAIR = ("gate", "--lane", "cpu", "--python-candidate", sys.executable)
REFUSALS = {
    "unknown lane 'tpu'; lanes: cpu, h200, h200x2, v6e": ("gate", "--lane", "tpu", "--candidate", "torch==1"),
    "name the candidate: --candidate 'torch==X'": ("gate", "--lane", "cpu"),
    "or --python-candidate PATH": (*PAIR, "--candidate", "torch==1"),
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
def test_bad_gate_input_is_one_line_and_exit_4(run: Any, words: str) -> None:
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
