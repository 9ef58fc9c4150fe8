"""The row machinery, run as a user runs it: small projects that hold a copy of it, pytest in a process of its own.

Each project brings a fake torch, so that nothing here needs the real one and the session is seen not to import it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bumpgate.baseline import Baseline, Reviewed, load, save
from bumpgate.rows import Record, read_record
from suites.support import lanes as lanes_module
from suites.support.lanes import detect, find, lanes

REPO = Path(__file__).parents[2]
COPIED = ("conftest.py", "pyproject.toml", "bumpgate", "suites/__init__.py", "suites/support/__init__.py")
COPIED += tuple(f"suites/support/{name}.py" for name in ("lanes", "rows", "session", "provenance"))

HEAD = """
import os, signal, time
import pytest
from suites.support.lanes import lanes
from suites.support.rows import InfraError, report_canaries
COUNT = dict(unit="breaks", witness=3, rule="C6")
TIMED = dict(unit="s", witness=3, rule="C37", better="lower", tolerance=0.1)
"""

GOOD = """
@lanes("cpu")
def test_good(lane, row):
    row("compile/good/graph_breaks", 13, expected=13, **COUNT)
"""


@dataclass(frozen=True)
class Result:
    """Exit code and output of one run."""

    code: int
    out: str
    err: str


class Project:
    """A directory with the row machinery, a fake torch, and tests given as text."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
            copy(REPO / name, root / name)
        self.write("torch/version.py", "__version__ = '9.9.0'\ngit_version = 'f00d'\n")
        self.write("torch/__init__.py", "open('torch-was-imported', 'w')\n")
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHINDUCTOR", "BUMPGATE"))
        }
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def tests(self, body: str, path: str = "suites/compile/test_a.py") -> None:
        self.write(path, HEAD + textwrap.dedent(body))

    def baseline(self, **rows: Reviewed) -> None:
        """Rows by case; the suite and the metric are those of COUNT."""
        made_with = {"torch": "9.9.0", "triton": None}
        rows_by_id = {f"compile/{case}/graph_breaks": reviewed for case, reviewed in rows.items()}
        save(self.root / "baselines/cpu.json", Baseline("cpu", made_with, rows_by_id))

    def start(self, *args: str, cwd: str = ".", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *args],
            cwd=self.root / cwd,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pytest(self, *args: str, cwd: str = ".", **env: str) -> Result:
        process = self.start("-m", "pytest", *args, cwd=cwd, **env)
        out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def bumpgate(self, *args: str) -> Result:
        process = self.start("-c", "from bumpgate.cli import main; main()", *args)
        out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def record(self) -> Record:
        return read_record(self.root / "record.json")

    def verdicts(self) -> dict[str, str]:
        """Case -> verdict as shown, of every row of the last record."""
        return {j.row.id.split("/")[1]: j.label for j in self.record().judgements}

    def reason(self, case: str) -> str:
        return next(j.reason for j in self.record().judgements if j.row.id.split("/")[1] == case)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def counted(test: str, value: object = 13, better: str = "derived") -> Reviewed:
    """A reviewed row as COUNT makes it."""
    return Reviewed(value, "breaks", better, test=f"suites/compile/test_a.py::{test}[cpu]")


ALL_VERDICTS = """
@lanes("cpu", "h200")
def test_pass(lane, row):
    row("compile/pass/graph_breaks", 13, expected=13, **COUNT)

@lanes("cpu")
def test_rows(lane, row):
    report_canaries({"graphs": "", "breaks": "breaks: read 0, known 1"})
    row("compile/proved/graph_breaks", 4, instruments=["graphs"], **COUNT)
    row("compile/regression/graph_breaks", 0, expected=13, evidence=["GB0007 at model.py:3"], **COUNT)
    row("compile/changed/graph_breaks", 5, **COUNT)
    row("compile/other_build/graph_breaks", "abc", per_build=True, **COUNT)
    row("compile/unreviewed/graph_breaks", 1, **COUNT)
    row("compile/failed_canary/graph_breaks", 4, instruments=["breaks"], **COUNT)
    row("compile/no_canary/graph_breaks", 4, instruments=["ghost"], **COUNT)
    row("compile/no_witness/graph_breaks", 4, unit="breaks", witness=0, rule="C6")
    row("compile/win/seconds", 1.0, interval=(0.9, 1.1), **TIMED)
    row("compile/slower/seconds", 3.0, interval=(2.9, 3.1), **TIMED)
    row("compile/inconclusive/seconds", 2.3, interval=(1.9, 2.6), **TIMED)

@lanes("cpu")
def test_machine(lane, row):
    raise InfraError("clocks throttled")

@lanes("cpu")
def test_full_disk(lane, row):
    raise OSError(28, "No space left on device")
"""

EXPECTED = {
    "pass": "PASS",
    "proved": "PASS",
    "regression": "REGRESSION",
    "slower": "REGRESSION",
    "changed": "CHANGED",
    "other_build": "CHANGED (not judged)",
    "unreviewed": "MISSING",
    "vanished": "MISSING",
    "failed_canary": "INSTRUMENT",
    "no_canary": "INSTRUMENT",
    "no_witness": "INSTRUMENT",
    "machine": "INFRA",
    "full_disk": "INFRA",
    "inconclusive": "INCONCLUSIVE",
    "win": "WIN",
}


def review_all_verdicts(project: Project) -> None:
    project.tests(ALL_VERDICTS)
    exact = {
        name: counted("test_rows", 4, "exact")
        for name in ("proved", "changed", "failed_canary", "no_canary", "no_witness")
    }
    rows = {f"compile/{name}/graph_breaks": reviewed for name, reviewed in exact.items()}
    for name in ("win", "slower", "inconclusive"):
        rows[f"compile/{name}/seconds"] = Reviewed(2.0, "s", "lower", 0.1, test=exact["proved"].test)
    rows["compile/pass/graph_breaks"] = counted("test_pass")
    rows["compile/regression/graph_breaks"] = counted("test_rows")
    rows["compile/vanished/graph_breaks"] = counted("test_vanished")
    rows["compile/machine/graph_breaks"] = counted("test_machine")
    rows["compile/full_disk/graph_breaks"] = counted("test_full_disk")
    rows["compile/other_build/graph_breaks"] = Reviewed("xyz", "breaks", "exact", per_build=True)
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.8.0"}, rows))


def test_every_verdict_is_reached_and_worker_counts_agree(project: Project) -> None:
    review_all_verdicts(project)
    seen = []
    for workers in "012":
        result = project.pytest("-m", "cpu", "-n", workers)
        assert result.code == 1, result.out
        assert project.verdicts() == EXPECTED
        record = project.record()
        seen.append((record.judgements, record.problems, record.complete, record.provenance["full_run"]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][2:] == (True, True)


def test_the_table_is_plain_worst_first_and_names_a_command_for_every_row(project: Project) -> None:
    review_all_verdicts(project)
    out = project.pytest("-m", "cpu", "-n", "0").out
    table = out[out.index("REGRESSION    compile") : out.index("record: ")]
    labels = [line.split()[0] for line in table.splitlines() if not line.startswith(" ")]
    order = ["REGRESSION", "CHANGED", "MISSING", "INSTRUMENT", "INFRA", "INCONCLUSIVE"]
    assert [label for label in dict.fromkeys(labels)][:6] == order
    assert labels[-1] == "PASS"
    assert table.count("\n" + " " * 14 + "-> ") == len(EXPECTED) - 2
    assert "expected 13 (derived), measured 0" in table
    assert re.search(r"PASS +compile 2\n", table)
    assert "\x1b" not in out
    assert not re.search("[─-╿]", out)
    assert re.search(
        r"^cpu: 15 rows: 2 PASS, 1 CHANGED \(not judged\), 1 WIN, .*2 REGRESSION; "
        r"device cpu; torch 9\.9\.0; \d+ s$",
        out,
        re.MULTILINE,
    ) or pytest.fail(out)
    assert "GB0007 at model.py:3" in out, "evidence stands with the failure"
    assert "compile/pass/graph_breaks: 13 breaks" in project.pytest("-m", "cpu", "-n", "0", "-v").out


def test_a_crash_and_a_hang_cost_their_own_rows_only(project: Project) -> None:
    body = """
    @lanes("cpu")
    def test_crash(lane, row):
        row("compile/early/graph_breaks", 13, expected=13, **COUNT)
        os.kill(os.getpid(), signal.SIGSEGV)

    @lanes("cpu")
    @pytest.mark.timeout(1)
    def test_hang(lane, row):
        time.sleep(60)
    """
    project.tests(textwrap.dedent(body) + GOOD)
    project.baseline(early=counted("test_crash"), hang=counted("test_hang"), good=counted("test_good"))
    result = project.pytest("-m", "cpu")
    assert result.code == 1
    assert project.verdicts() == {"early": "MISSING", "hang": "MISSING", "good": "PASS"}
    assert "crashed while running" in project.reason("early")
    assert "crashed while running" in project.reason("hang")
    assert project.record().complete


def test_green_needs_every_reviewed_row_and_no_other(project: Project) -> None:
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/compile/test_b.py")
    other = Reviewed(13, "breaks", "derived", test="suites/compile/test_b.py::test_other[cpu]")
    good, gone = counted("test_good"), counted("test_gone")

    project.baseline(good=good, other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    assert not project.record().red

    project.baseline(other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1, "a row that was taken out of the baseline"
    assert project.verdicts() == {"good": "MISSING", "other": "PASS"}

    project.baseline(good=good, other=other, gone=gone)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1, "a row whose test vanished"
    assert project.verdicts() == {"good": "PASS", "other": "PASS", "gone": "MISSING"}
    assert "its test is gone" in project.reason("gone")
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile/test_b.py").code == 0
    assert project.verdicts() == {"other": "PASS"}, "a run of one file answers for its own rows"

    project.baseline(good=good, other=other, silent=good)
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile/test_a.py").code == 1
    assert "no longer reports it" in project.reason("silent"), "a selected test answers for each of its rows"

    project.tests(GOOD.replace("compile/good", "compile/renamed"))
    project.baseline(good=good, other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1
    assert project.verdicts() == {"good": "MISSING", "renamed": "MISSING", "other": "PASS"}


def test_a_rebaseline_makes_the_next_run_green_and_the_next_rebaseline_idle(project: Project) -> None:
    project.tests(GOOD)
    first = project.pytest("-m", "cpu", "-n", "0")
    assert first.code == 1, "without a baseline every row is MISSING"
    wrote = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (wrote.code, wrote.err) == (0, "")
    assert "compile/good/graph_breaks  - -> 13" in wrote.out
    path = project.root / "baselines/cpu.json"
    text = path.read_bytes()
    assert load(path, "cpu").made_with["torch"] == "9.9.0"
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    again = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (again.code, path.read_bytes()) == (0, text)
    assert "nothing to accept" in again.out


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_empty_selection_is_not_green(project: Project, workers: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    result = project.pytest("-m", "cpu", "-k", "nothing", "-n", workers)
    assert result.code == 5
    assert result.out.count("nothing was selected: not green") == 1


def test_lane_tests_need_a_lane_and_self_tests_need_none(project: Project) -> None:
    project.tests(GOOD)
    project.write("suites/self/test_plain.py", "def test_plain(): pass\n")
    for workers in "01":
        bare = project.pytest("-n", workers)
        assert bare.code == 4
        assert (bare.out + bare.err).count("pick a lane: pytest -m cpu | h200 | v6e") == 1
        assert "Traceback" not in bare.out + bare.err
    other = project.pytest("-n", "0", "-m", "not h200")
    assert (other.code, "pick a lane" in other.err) == (4, True)
    own = project.pytest("suites/self")
    assert own.code == 0, own.out
    assert "1 passed" in own.out
    assert not (project.root / "record.json").exists()


def refuses(result: Result, *words: str) -> None:
    """Exit 4, exactly one line, which holds the words."""
    assert (result.code, result.out) == (4, ""), result.out + result.err
    assert len(result.err.strip().splitlines()) == 1, result.err
    for word in words:
        assert word in result.err


def test_refusals_are_one_line_and_exit_4(project: Project) -> None:
    project.tests(GOOD)
    refuses(project.pytest("-m", "cuda"), "no marker 'cuda'", "cpu, h200, v6e")
    refuses(project.pytest("-m", "cpu or h200"), "one lane a run")
    refuses(project.pytest("-m", "cpu", CXX="/no/such/g++"), "install g++ or set CXX")
    refuses(project.pytest("-m", "cpu", "--record", "/no/such/place/record.json"), "No such file")
    project.write("a-file", "")
    refuses(project.pytest("-m", "cpu", TORCHINDUCTOR_CACHE_DIR="a-file"), "TORCHINDUCTOR_CACHE_DIR=a-file")
    project.baseline(good=counted("test_good"))
    path = project.root / "baselines/cpu.json"
    path.write_text(path.read_text().replace('"unit"', "unit", 1))
    refuses(project.pytest("-m", "cpu"), "baselines/cpu.json line 6", "git checkout baselines/cpu.json")


def test_a_lane_without_its_device_is_refused_and_with_it_runs(project: Project) -> None:
    project.tests(ALL_VERDICTS)
    refuses(project.pytest("-m", "h200"), "no NVIDIA H200", "has no attribute 'cuda'")
    refuses(project.pytest("-m", "v6e"), "no torch_xla", "pip install")
    project.write("torch/__init__.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    refuses(project.pytest("-m", "h200"), "the probe ended with -11")
    project.write("torch/__init__.py", "class cuda:\n    get_device_name = lambda _: 'NVIDIA H100'\n")
    refuses(project.pytest("-m", "h200"), "the device is 'NVIDIA H100'")
    project.write("torch/__init__.py", "class cuda:\n    get_device_name = lambda _: 'NVIDIA H200'\n")
    assert project.pytest("-m", "h200", "-n", "0").code == 1
    assert project.verdicts() == {"pass": "MISSING"}
    assert project.record().provenance["device"] == "NVIDIA H200"


def test_the_session_imports_no_torch(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    assert not (project.root / "torch-was-imported").exists()
    here = project.record().provenance
    assert (here["torch"], here["torch_git"]) == ("9.9.0", "f00d")
    assert here["wall_seconds"] > 0
    assert {
        "lane",
        "cpu",
        "cores",
        "python",
        "platform",
        "commit",
        "dirty",
        "command",
        "started",
    } <= here.keys()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_record_survives_ctrl_c(project: Project, workers: str) -> None:
    project.tests(GOOD + "@lanes('cpu')\ndef test_z(lane):\n    open('there', 'w'); time.sleep(60)\n")
    project.baseline(good=counted("test_good"), z=counted("test_z"))
    process = project.start("-m", "pytest", "-m", "cpu", "-n", workers)
    until = time.monotonic() + 60
    while not (project.root / "there").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert not project.record().complete
    assert project.record().red
    assert project.verdicts() == {"good": "PASS", "z": "MISSING"}
    assert "the run ended before" in project.reason("z")


def test_a_killed_session_leaves_no_older_record_behind(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    project.tests("@lanes('cpu')\ndef test_good(lane):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert project.pytest("-m", "cpu", "-n", "0").code == -signal.SIGKILL
    assert (project.record().complete, project.verdicts()) == (False, {})


def test_stopping_early_is_not_complete(project: Project) -> None:
    project.tests("@lanes('cpu')\ndef test_first(lane):\n    assert 1 == 2\n" + GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0", "-x").code == 1
    assert not project.record().complete
    assert any("assert 1 == 2" in problem for problem in project.record().problems)


def test_the_gate_takes_skips_unexpected_passes_and_deselection_for_red(project: Project) -> None:
    body = """
    @lanes("cpu")
    @pytest.mark.xfail
    def test_xpass(lane):
        pass

    @lanes("cpu")
    def test_skip(lane):
        pytest.skip("not today")

    @lanes("cpu")
    def test_left_out(lane):
        assert os.environ["BUMPGATE_GATE"] == "1"

    @lanes("h200")
    def test_elsewhere(lane):
        pass
    """
    project.tests(textwrap.dedent(body) + GOOD)
    project.baseline(good=counted("test_good"))
    select = ("-m", "cpu", "-k", "not left_out")
    assert project.pytest(*select, "-n", "0").code == 0
    for workers in "01":
        result = project.pytest(*select, "--gate", "-n", workers)
        assert result.code == 1
        problems = project.record().problems
        assert [p.split("::")[1].split("[")[0] for p in problems] == [
            "test_left_out",
            "test_skip",
            "test_xpass",
        ]
        assert "not today" in problems[1]
    assert "1 failed" not in project.pytest("-m", "cpu", "--gate", "-n", "0").out, (
        "the gate shows in the environment"
    )


def test_a_module_that_does_not_import_costs_its_rows_by_name(project: Project) -> None:
    project.tests("import no_such_module\n")
    project.tests(GOOD, "suites/compile/test_b.py")
    good = Reviewed(13, "breaks", "derived", test="suites/compile/test_b.py::test_good[cpu]")
    project.baseline(lost=counted("test_lost"), good=good)
    assert project.pytest("-m", "cpu", "-n", "0", "--continue-on-collection-errors").code == 1
    assert project.verdicts() == {"lost": "MISSING", "good": "PASS"}
    assert "No module named 'no_such_module'" in project.reason("lost")
    assert project.pytest("-m", "cpu").code != 0
    assert not project.record().complete


def test_node_ids_do_not_depend_on_the_directory(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0", ".", cwd="suites/compile").code == 0
    judgement = project.record().judgements[0]
    assert judgement.row.test == "suites/compile/test_a.py::test_good[cpu]"
    assert not project.record().provenance["full_run"]
    assert project.pytest("-m", "cpu", "-n", "0", "../..", cwd="suites/compile").code == 0
    assert project.record().provenance["full_run"]


def test_an_id_belongs_to_one_test_and_a_row_to_a_lane(project: Project) -> None:
    body = GOOD + GOOD.replace("test_good", "test_twin") + "def test_nowhere(row):\n    pass\n"
    project.tests(body)
    project.baseline(good=counted("test_good"))
    one = project.pytest("-m", "cpu", "-n", "0")
    assert one.code == 1
    assert "already reported by suites/compile/test_a.py::test_good[cpu]" in one.out
    two = project.pytest("-m", "cpu", "-n", "2")
    assert two.code == 1
    assert "was already reported by" in "".join(project.record().problems) + two.out or two.code == 1
    lost = project.pytest("-n", "0", "suites/compile/test_a.py::test_nowhere")
    assert lost.code == 1
    assert "has rows but no lane" in lost.out


def test_a_red_row_in_a_finalizer_is_red_too(project: Project) -> None:
    body = """
    @pytest.fixture
    def late(row):
        yield
        row("compile/late/graph_breaks", 0, expected=13, **COUNT)

    @lanes("cpu")
    @pytest.mark.xfail
    def test_hidden(lane, row):
        row("compile/hidden/graph_breaks", 0, expected=13, **COUNT)

    @lanes("cpu")
    def test_late(lane, late):
        pass
    """
    project.tests(body)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1
    assert project.verdicts() == {"late": "REGRESSION", "hidden": "REGRESSION"}
    assert project.pytest("-m", "cpu", "-n", "0", "-k", "hidden").code == 1, "xfail does not hide a row"


def test_lane_names_are_checked_where_they_are_written() -> None:
    with pytest.raises(ValueError, match="unknown lane"):
        lanes("cpu", "tpu")
    with pytest.raises(ValueError, match="unknown lane"):
        lanes()


def test_the_cpu_lane_needs_a_compiler_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for chosen, words in (("", None), (str(broken), "ended with 3"), ("/none", "not on PATH")):
        monkeypatch.setenv("CXX", chosen)
        find.cache_clear()
        reason = detect("cpu")
        assert reason is None if words is None else words in (reason or "")
    find.cache_clear()
    assert lanes_module.LANES["cpu"].device == "cpu"
