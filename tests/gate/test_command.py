"""`bumpgate gate --command`: a command's metrics as rows, compared between two interpreters."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bumpgate.core import gate_file
from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record, Row, RowError
from bumpgate.gate import metrics, state
from bumpgate.gate.command import _show, other_variant
from bumpgate.gate.view import View, findings_text
from bumpgate.plugin.metrics import FORMAT, report
from bumpgate.process.runner import options_of
from bumpgate.process.tree_digest import bind
from tests.support.foreign import ANY_ROUND_IS_QUIET, LANE, Foreign
from tests.support.gating import Machine
from tests.support.git_repository import GitRepository
from tests.support.project import Result, package_of_side, wrapped_python
from tests.support.reports import save_record

GOOD = {"name": "graphs", "value": 3, "unit": "graphs", "better": "exact"}
TIME = {"name": "step_seconds", "value": 0.5, "unit": "s", "better": "lower"}


class Rows(list[Row]):
    """Takes what a test reports, with the checks of a row."""

    def exact(
        self, id: str, value: Any, unit: str, *, seen: int, better: str = "exact", paired: bool
    ) -> None:
        if id in [row.id for row in self]:
            raise RowError(f"row {id!r}: already reported by test_command")
        self.append(Row(id, value, unit, seen, "R0", better=better, paired=paired))

    cost = exact


def printing(*lines: object) -> str:
    """A shell command that prints these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return f"{{python}} -c '{'; '.join(f'print({json.dumps(text)})' for text in texts) or 'pass'}'"


def test_each_metric_is_a_row() -> None:
    rows = Rows()
    report(
        rows, printing(GOOD, "", TIME | {"name": "model/tiny/tokens", "better": "higher", "unit": "tokens/s"})
    )
    assert [(row.id, row.value, row.unit, row.better) for row in rows] == [
        ("command/metrics/graphs", 3, "graphs", "exact"),
        ("model/tiny/tokens", 0.5, "tokens/s", "higher"),
    ]
    assert all(row.paired and row.witness == 1 for row in rows)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("step 3 of 10", "line 2 of the output is not a metric: step 3 of 10 ("),
        ("3", "its fields must be better, name, unit, value"),
        ({"name": "x", "value": 1}, "its fields must be better, name, unit, value"),
        (TIME | {"value": 0.0}, "must be a finite number above 0, got 0.0"),
        (TIME | {"value": True}, "must be a finite number above 0, got True"),
        (TIME | {"better": "less"}, "better must be one of exact, lower, higher, got 'less'"),
        (TIME | {"name": "Step seconds"}, "the id must read suite/case/metric"),
        (TIME | {"name": 3}, "name must be a string, got 3"),
        (TIME | {"unit": ""}, "unit must name what is counted"),
        (TIME | {"value": [3], "better": "exact"}, "value must be int, float, str, bool or None"),
        (GOOD, "already reported by test_command"),
    ],
)
def test_output_line_that_is_not_a_metric_is_refused(line: object, words: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        report(Rows(), printing(GOOD, line))
    message = str(failure.value)
    assert message.startswith("line 2 of the output is not a metric: ")
    assert words in message
    assert FORMAT in message
    assert len(message) < 300, "a record keeps 300 characters"


@pytest.mark.parametrize(
    ("command", "words"),
    [(printing(), "the command printed no metric; "), (f"{printing(GOOD)}; exit 3", "ended with 3")],
)
def test_command_without_a_result_fails(command: str, words: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=words):
        report(Rows(), command)


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """A repository without pytest tests, a torch that imports at once, and an interpreter for each side."""
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", LANE)
    made.write("torch.py", "")
    for side in ("adopted", "candidate"):
        site = package_of_side(tmp_path / f".{side}/site", side)
        made.write(f".{side}/python", wrapped_python(site=site, SIDE=side))
        os.chmod(tmp_path / f".{side}/python", 0o755)
    made.env["BUMPGATE_HOME"] = str(tmp_path / ".home")
    return made


def gate(foreign: Foreign, body: str, *options: str) -> Result:
    """Gate a command that prints `body`'s lines; `SIDE` is the name of the side."""
    foreign.write("bench.py", f"import os\nSIDE = os.environ['SIDE']\n{body}\n")
    pythons = ("--python-adopted", ".adopted/python", "--python-candidate", ".candidate/python")
    return foreign.bumpgate("gate", "--lane", "mine", *pythons, "--command", "python bench.py", *options)


def test_gate_compares_a_command_in_two_environments(foreign: Foreign) -> None:
    exact = {"adopted": json.dumps(GOOD), "candidate": json.dumps(GOOD | {"value": 4})}
    ended = gate(foreign, f"print({exact}[SIDE])\nprint({json.dumps(TIME)!r})", "--budget", "0")
    assert ended.code == 1, ended.out + ended.err
    assert "adopted: mine: 2 rows: 2 PASS" in ended.err
    found = json.loads((foreign.root / "build/gate/mine-python/gate.json").read_text())
    changed, undecided = found["findings"]
    assert (changed["decision"], changed["label"], changed["rows"]) == (
        "HOLD",
        "CHANGED",
        ["command/metrics/graphs"],
    )
    assert (changed["adopted"], changed["candidate"]) == (
        ["command/metrics/graphs: 3 graphs"],
        ["command/metrics/graphs: 4 graphs"],
    )
    assert undecided["rows"] == ["command/metrics/step_seconds"], (
        "left to the sessions, for which the budget is too small"
    )
    assert found["timed"].keys() == {"command/metrics/step_seconds"}
    kept = {name: value for name, value in foreign.env.items() if name != "PYTHONPATH"}
    kept.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # a gate removes it too
    again = subprocess.run(
        changed["repro"], shell=True, cwd=foreign.root, env=kept, capture_output=True, text=True
    )
    assert ".candidate/python" in changed["repro"]
    assert (again.returncode, "mine: 2 rows: 2 PASS" in again.stdout) == (0, True), (
        again.stdout + again.stderr
    )
    other = foreign.bumpgate(
        *(
            "gate",
            "--lane",
            "mine",
            "--python-adopted",
            ".adopted/python",
            "--python-candidate",
            ".candidate/python",
        ),
        *("--command", "python other.py", "--budget", "0", "--resume"),
    )
    assert (other.code, "is of another gate (other command)" in other.err) == (4, True), other.err


def test_gates_of_two_commands_run_at_the_same_time(tmp_path: Path) -> None:
    """Neither overwrites the test of the other one, nor is it an edit of the other one's tree."""
    GitRepository(tmp_path).commit("one", {"pyproject.toml": ""})
    small, large = "python bench.py --size small", "python bench.py --size large"
    metrics.write_test(tmp_path, "mine", small)
    before = bind(tmp_path)
    metrics.write_test(tmp_path, "mine", large)
    for command in (small, large):
        assert f"report(row, {command!r})" in (tmp_path / metrics.test_path("mine", command)).read_text()
    assert before.differences(bind(tmp_path)) == []


def test_invalid_metric_line_makes_the_gate_unknown(foreign: Foreign) -> None:
    ended = gate(foreign, "print('loading')")
    assert ended.code == 125, ended.out + ended.err
    assert "line 1 of the output is not a metric: loading (" in ended.out
    assert FORMAT in " ".join(ended.out.split())


def test_command_that_the_shell_cannot_parse_is_refused(foreign: Foreign) -> None:
    """Before anything is measured: nothing of it could run on either side."""
    pythons = ("--python-adopted", ".adopted/python", "--python-candidate", ".candidate/python")
    ended = foreign.bumpgate("gate", "--lane", "mine", *pythons, "--command", "python 'bench.py")
    assert (ended.code, ended.out) == (4, ""), ended.out
    assert ended.err.startswith('bumpgate: --command "python \'bench.py": ')
    assert "nterminated quoted string" in ended.err or "unexpected EOF" in ended.err


def test_command_with_a_selection_is_refused(foreign: Foreign) -> None:
    ended = gate(foreign, "", "--", "tests")
    assert (ended.code, ended.out) == (4, "")
    assert ended.err == "bumpgate: --command and a pytest selection: use one, not both\n"


# Options of a gate's selection: every later run of its tests has them, since they may choose what is measured.


pytestmark = pytest.mark.long(30)

CONFTEST = (
    ANY_ROUND_IS_QUIET
    + """
def pytest_addoption(parser):
    parser.addoption("--mode", default="bf16")
"""
)
# The candidate is slow in one mode. Each run writes its side and mode.
TEST = """
import os, pytest

@pytest.mark.mine
def test_step(row, request):
    mode, side = request.config.getoption("--mode"), os.environ["SIDE"]
    with open("modes.log", "a") as log:
        print(side, mode, file=log)
    seconds = 1.5 if side == "candidate" and mode == "fp8" else 1.0
    row.{verb}("speed/step/seconds", seconds, "s", seen=1, {more})
"""
SIDES = ("--python-adopted", ".adopted/python", "--python-candidate", ".candidate/python")
GATE = ("gate", "--lane", "mine", *SIDES, "--sessions", "8")
FP8 = ("--", "--mode", "fp8", "tests")


@pytest.fixture
def project(tmp_path: Path) -> Foreign:
    """A project whose candidate is 1.5 times as slow with --mode fp8."""
    made = Foreign(tmp_path)
    for side in ("adopted", "candidate"):
        python = f".{side}/python"
        made.write(python, wrapped_python(SIDE=side))
        (tmp_path / python).chmod(0o755)
    made.env["BUMPGATE_HOME"] = str(tmp_path / ".home")
    made.write("bumpgate.toml", LANE)
    made.write("torch.py", "")
    made.write("conftest.py", CONFTEST)
    made.write("tests/test_step.py", TEST.format(verb="cost", more="paired=True"))
    return made


def test_sessions_run_with_the_options_of_the_selection(project: Foreign) -> None:
    done = project.bumpgate(*GATE, *FP8)
    assert (done.code, "SLOWER" in done.out) == (1, True), done.out + done.err
    modes = (project.root / "modes.log").read_text().split()[1::2]
    assert len(modes) > 2
    assert set(modes) == {"fp8"}


def test_second_reading_runs_with_the_options(project: Foreign) -> None:
    """A time outside of a bound on one side is read again: in another mode it would pass."""
    project.write("tests/test_step.py", TEST.format(verb="bound", more="at_most=1.2"))
    reviewed = Reviewed(1.0, "s", "derived", test="tests/test_step.py::test_step")
    (project.root / "baselines").mkdir()
    save(project.root / "baselines/mine.json", Baseline("mine", {}, {"speed/step/seconds": reviewed}))
    done = project.bumpgate(*GATE, *FP8)
    assert (done.code, "REGRESSION" in done.out) == (1, True), done.out + done.err
    assert "still outside: speed/step/seconds" in done.err


def test_resumed_gate_needs_both_environments(project: Foreign) -> None:
    """If one does not start any more, the gate ends with one line and keeps what it measured."""
    first = project.bumpgate(*GATE, "--budget", "0", *FP8)
    assert first.code == 125, first.out + first.err
    line = first.err.splitlines()[-1]
    assert line.startswith("the budget ended before every timed row was decided. Resume with: bumpgate gate")
    assert " --resume" in line
    python = project.root / ".candidate/python"
    python.write_text("#!/bin/sh\necho libcudart.so.13: cannot open >&2; exit 1\n")
    again = project.bumpgate(*GATE, "--resume", *FP8)
    assert (again.code, again.out) == (4, ""), again.out + again.err
    assert "the candidate environment does not start any more (" in again.err
    assert "Traceback" not in again.err


OPTIONS = {
    "no path": (["--mode=fp8"], [], ["--mode=fp8"]),
    "path": (["--mode", "fp8", "tests/a.py::test_b"], ["tests/a.py::test_b"], ["--mode", "fp8"]),
    "value like a path, first": (["-k", "tests", "tests"], ["tests"], ["-k", "tests"]),
    "value like a path, last": (["tests", "-k", "tests"], ["tests"], ["-k", "tests"]),
    "flag": (["-x", "tests"], ["tests"], ["-x"]),
    "end of options": (["-x", "--", "tests"], ["tests"], ["-x"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_selection_without_its_paths(name: str) -> None:
    selection, paths, options = OPTIONS[name]
    assert options_of(selection, Record({"paths": paths}, ())) == options


# Notes below the findings of a gate: different variants of torch, and what its lane runs noted.


@pytest.mark.parametrize(
    ("adopted", "candidate", "noted"),
    [
        ("2.13.0+cpu", "2.14.1+cu130", True),
        ("2.13.0+cpu", "2.14.1+cpu", False),
        ("2.13.0+cpu", "2.14.1", False),
        ("2.14.0a0+git21fec65", "2.14.0a0+git8d1e2f0", False),
        ("2.13.0+cu130.with.a", "2.14.1+cu130", False),
    ],
)
def test_different_variants_of_torch_are_noted(
    adopted: str, candidate: str, noted: bool, machine: Machine, out: Path
) -> None:
    machine.sides["adopted"].torch, machine.sides["candidate"].torch = adopted, candidate
    machine.gate(out)
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    note = other_variant(found)
    assert bool(note) == noted
    if noted:
        assert note.startswith(f"note: {adopted} and {candidate} are different variants: ")
        assert note.endswith('--index URL, --candidate "torch==X+cpu"')


def test_margin_that_matches_no_row_is_shown_by_the_gate(
    machine: Machine, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.gate(out)
    path = out / "adopted.json"
    raw = json.loads(path.read_text())
    raw["provenance"]["margins"] = ["no row of this run matches 'a/*'"]
    save_record(path, raw)
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    _show(found, out, again=False)
    assert "margin: no row of this run matches 'a/*'\n" in capsys.readouterr().out


# The findings that `bumpgate gate` prints.


FINDING = Finding(
    Decision.HOLD, "CHANGED", "graph_breaks", "GB0007", tuple(f"compile/{i}/graph_breaks" for i in range(9)),
    ("compile/0/graph_breaks: 13 breaks",), ("compile/0/graph_breaks: 14 breaks", "GB0007 at model.py:3"),
    "pytest -m cpu -n 0 t.py",
)  # fmt: skip


def test_narrow_terminal_folds_all_columns_but_the_decision() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=30, no_color=True)
    findings_text([replace(FINDING, adopted=("x" * 60,), candidate=("y" * 60,))], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "HOLD" in text
    assert (text.count("x"), text.count("y")) == (60, 60 + FINDING.repro.count("y"))


@pytest.mark.parametrize("width", [None, 160])
def test_finding_text_shows_both_sides_and_the_repro(width: int | None) -> None:
    """Width None is a log: lines are not wrapped, so that it can be searched."""
    console = Console(file=io.StringIO(), force_terminal=width is not None, width=width or 40, no_color=True)
    findings_text([FINDING], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    squeezed = "".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    for part in ("HOLD", "... and 3 more in gate.json", FINDING.repro, "GB0007"):
        assert "".join(part.split()) in squeezed
    if width is None:
        assert f"candidate: {FINDING.candidate[1]}\n" in text
        assert f"-> {FINDING.repro}\n" in text


def test_finished_step_is_one_line_of_a_log() -> None:
    console = Console(file=io.StringIO(), width=20)
    View(console).say("[bold] " + "step " * 10)
    assert console.file.getvalue() == "[bold] " + "step " * 10 + "\n"  # type: ignore[attr-defined]
