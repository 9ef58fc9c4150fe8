"""`bumpgate gate --command`, the options of the selection in later runs, and what a gate prints."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record, Row, RowError
from bumpgate.gate import command
from bumpgate.gate.command import show
from bumpgate.gate.view import View, code_commands, findings_text, other_variant
from bumpgate.plugin.metrics import FORMAT, report
from bumpgate.process.runner import options_of
from bumpgate.process.tree_digest import bind
from tests.support.foreign import ANY_ROUND_IS_QUIET, LANE, Foreign
from tests.support.gating import Machine, written
from tests.support.git_repository import GitRepository
from tests.support.project import Result, package_of_side, wrapped_python
from tests.support.reports import save_record

pytestmark = pytest.mark.long(30)
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
    rate = TIME | {"name": "model/tiny/tokens", "better": "higher", "unit": "tokens/s"}
    report(rows, printing(GOOD, "", rate))
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


SIDES = ("--python-adopted", ".adopted/python", "--python-candidate", ".candidate/python")
GATE = ("gate", "--lane", "mine", *SIDES)


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """A repository with a torch that imports at once, and an interpreter for each side."""
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
    return foreign.bumpgate(*GATE, "--command", "python bench.py", *options)


def test_gate_compares_a_command_in_two_environments(foreign: Foreign) -> None:
    exact = {"adopted": json.dumps(GOOD), "candidate": json.dumps(GOOD | {"value": 4})}
    ended = gate(foreign, f"print({exact}[SIDE])\nprint({json.dumps(TIME)!r})", "--budget", "0")
    assert ended.code == 1, ended.out + ended.err
    assert "adopted: mine: 2 rows: 2 PASS" in ended.err
    found = json.loads((foreign.root / "build/gate/mine-python/gate.json").read_text())
    changed, undecided = found["findings"]
    assert {name: changed[name] for name in ("decision", "label", "rows", "adopted", "candidate")} == {
        "decision": "HOLD",
        "label": "CHANGED",
        "rows": ["command/metrics/graphs"],
        "adopted": ["command/metrics/graphs: 3 graphs"],
        "candidate": ["command/metrics/graphs: 4 graphs"],
    }
    time = "command/metrics/step_seconds"
    assert (undecided["rows"], [*found["timed"]]) == ([time], [time]), "left to sessions without a budget"
    kept = {name: value for name, value in foreign.env.items() if name != "PYTHONPATH"}
    kept.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # a gate removes it too
    again = subprocess.run(
        changed["repro"], shell=True, cwd=foreign.root, env=kept, capture_output=True, text=True
    )
    assert ".candidate/python" in changed["repro"]
    assert (again.returncode, "mine: 2 rows: 2 PASS" in again.stdout) == (0, True), (
        again.stdout + again.stderr
    )
    other = foreign.bumpgate(*GATE, "--command", "python other.py", "--budget", "0", "--resume")
    assert (other.code, "is of another gate (other command)" in other.err) == (4, True), other.err


def test_gates_of_two_commands_run_at_the_same_time(tmp_path: Path) -> None:
    """Neither overwrites the test of the other one, nor is it an edit of the other one's tree."""
    GitRepository(tmp_path).commit("one", {"pyproject.toml": ""})
    small, large = "python bench.py --size small", "python bench.py --size large"
    command.write_test(tmp_path, "mine", small)
    before = bind(tmp_path)
    command.write_test(tmp_path, "mine", large)
    for text in (small, large):
        assert f"report(row, {text!r})" in (tmp_path / command.test_path("mine", text)).read_text()
    assert before.differences(bind(tmp_path)) == []


def test_invalid_metric_line_makes_the_gate_unknown(foreign: Foreign) -> None:
    ended = gate(foreign, "print('loading')")
    assert ended.code == 125, ended.out + ended.err
    assert "line 1 of the output is not a metric: loading (" in ended.out
    assert FORMAT in " ".join(ended.out.split())


def test_command_that_the_shell_cannot_parse_is_refused(foreign: Foreign) -> None:
    """Before anything is measured: nothing of it could run on either side."""
    ended = foreign.bumpgate(*GATE, "--command", "python 'bench.py")
    assert (ended.code, ended.out) == (4, ""), ended.out
    assert ended.err.startswith('bumpgate: --command "python \'bench.py": ')
    assert "nterminated quoted string" in ended.err or "unexpected EOF" in ended.err


# Options of a gate's selection: every later run of its tests has them, since they may choose what is measured.

CONFTEST = (
    ANY_ROUND_IS_QUIET
    + """
def pytest_addoption(parser):
    parser.addoption("--mode", default="bf16")
"""
)
# The candidate is slow in one mode: its paired time, and a time with a bound, which is read again. Each run writes its
# mode.
TEST = """
import os, pytest

@pytest.mark.mine
def test_step(row, request):
    mode, side = request.config.getoption("--mode"), os.environ["SIDE"]
    with open("modes.log", "a") as log:
        print(mode, file=log)
    seconds = 1.5 if side == "candidate" and mode == "fp8" else 1.0
    row.cost("speed/step/seconds", seconds, "s", seen=1, paired=True)
    row.bound("speed/first/seconds", seconds, "s", seen=1, at_most=1.2)
"""
FP8 = ("--sessions", "8", "--", "--mode", "fp8", "tests")


@pytest.fixture
def project(foreign: Foreign) -> Foreign:
    """A project whose candidate is 1.5 times as slow with --mode fp8."""
    foreign.write("conftest.py", CONFTEST)
    foreign.write("tests/test_step.py", TEST)
    test = "tests/test_step.py::test_step"
    rows = {"speed/first/seconds": Reviewed(1.0, "s", "derived", test=test)}
    (foreign.root / "baselines").mkdir()
    save(foreign.root / "baselines/mine.json", Baseline("mine", {}, rows))
    return foreign


def test_later_runs_have_the_options_of_the_selection(project: Foreign) -> None:
    """The second reading of a time outside of its bound, and the sessions: in another mode both would pass."""
    done = project.bumpgate(*GATE, *FP8)
    assert (done.code, "SLOWER" in done.out, "REGRESSION" in done.out) == (1, True, True), done.out + done.err
    assert "still outside: speed/first/seconds" in done.err
    modes = (project.root / "modes.log").read_text().split()
    assert (len(modes) > 4, set(modes)) == (True, {"fp8"})


def test_resumed_gate_needs_both_environments(project: Foreign) -> None:
    """If one does not start any more, the gate ends with one line and keeps what it measured."""
    first = project.bumpgate(*GATE, "--budget", "0", "--sessions", "8", "--", "tests")
    assert first.code == 125, first.out + first.err
    line = first.err.splitlines()[-1]
    assert line.startswith("the budget ended before every timed row was decided. Resume with: bumpgate gate")
    assert " --resume" in line
    python = project.root / ".candidate/python"
    python.write_text("#!/bin/sh\necho libcudart.so.13: cannot open >&2; exit 1\n")
    again = project.bumpgate(*GATE, "--resume", "--sessions", "8", "--", "tests")
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


# What a gate prints: notes, and the findings.


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
def test_different_variants_of_torch_are_noted(adopted: str, candidate: str, noted: bool) -> None:
    note = other_variant(adopted, candidate)
    assert bool(note) == noted
    if noted:
        assert note.startswith(f"note: {adopted} and {candidate} are different variants: ")
        assert note.endswith('--index URL, --candidate "torch==X+cpu"')


def test_notes_of_the_lane_runs_are_shown_by_the_gate(
    machine: Machine, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.plant("adopted", torch="2.13.0+cpu")
    machine.plant("candidate", torch="2.14.1+cu130")
    machine.gate(out)
    raw = json.loads((out / "adopted.json").read_text())
    raw["provenance"]["margins"] = ["no row of this run matches 'a/*'"]
    save_record(out / "adopted.json", raw)
    show(written(out), out, again=False)
    shown = capsys.readouterr().out
    assert "margin: no row of this run matches 'a/*'\n" in shown
    assert "note: 2.13.0+cpu and 2.14.1+cu130 are different variants: " in shown


FINDING = Finding(
    Decision.HOLD, "CHANGED", "graph_breaks", "GB0007", tuple(f"compile/{i}/graph_breaks" for i in range(9)),
    ("compile/0/graph_breaks: 13 breaks",), ("compile/0/graph_breaks: 14 breaks", "GB0007 at model.py:3"),
    "pytest -m cpu -n 0 t.py",
)  # fmt: skip


def text_of(finding: Finding, width: int, terminal: bool) -> str:
    file = io.StringIO()
    findings_text([finding], Console(file=file, force_terminal=terminal, width=width, no_color=True))
    return file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_finding_text_shows_both_sides_and_the_repro_in_unbroken_lines(terminal: bool) -> None:
    """A log can be searched, and a command copied."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(FINDING, 30, terminal))
    for part in ("HOLD ", "... and 3 more in gate.json\n", "GB0007"):
        assert part in text
    for line in (f"candidate: {FINDING.candidate[1]}\n", f"-> {FINDING.repro}\n"):
        assert line in text


def test_finding_that_code_may_explain_names_the_diff_of_both_sides() -> None:
    found = replace(FINDING, repro="/b/bin/python -m pytest -m cpu -n 0 't.py::a[1]'")
    others = [replace(found, label="MISSING"), replace(found, decision=Decision.ADOPT), FINDING]
    sides = {name: SimpleNamespace(python=f"/{name}/bin/python") for name in ("adopted", "candidate")}
    gate: Any = SimpleNamespace(findings=[found, found, *others], **sides)
    line = "bumpgate diff /adopted/bin/python /candidate/bin/python -- -m cpu -n 0 't.py::a[1]'"
    assert code_commands(gate) == [line]


def test_finished_step_is_one_line_of_a_log() -> None:
    file = io.StringIO()
    View(Console(file=file, width=20)).say("[bold] " + "step " * 10)
    assert file.getvalue() == "[bold] " + "step " * 10 + "\n"
