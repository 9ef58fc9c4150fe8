"""`bumpgate gate --command`: a command's metrics as rows, compared between two interpreters."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.rows import Row, RowError
from bumpgate.gate import metrics
from bumpgate.plugin.metrics import FORMAT, report
from bumpgate.process.tree_digest import bind
from tests.support.foreign import LANE, Foreign
from tests.support.git_repository import GitRepository
from tests.support.project import Result, wrapped_python

GOOD = {"name": "graphs", "value": 3, "unit": "graphs", "better": "exact"}
TIME = {"name": "step_seconds", "value": 0.5, "unit": "s", "better": "lower"}


class Rows(list[Row]):
    """Takes what a test reports, with the checks of a row."""

    def __call__(self, id: str, value: Any, **fields: Any) -> None:
        if id in [row.id for row in self]:
            raise RowError(f"row {id!r}: already reported by test_command")
        self.append(Row(id, value, rule="R0", **fields))


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
        made.write(f".{side}/python", wrapped_python(SIDE=side))
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
