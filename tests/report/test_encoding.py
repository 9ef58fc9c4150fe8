"""Text that UTF-8 cannot encode, of file names and variables, ends no command with a traceback."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.accepted import today
from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.errors import loads
from bumpgate.core.rows import read_record
from bumpgate.gate import state
from bumpgate.gate.evidence import judge
from bumpgate.process.tree_digest import Binding, bind
from tests.support.lane_files import declare_lanes
from tests.support.project import GOOD, Project, counted
from tests.support.reports import BREAKS, bumpgate, gate_of_day, save_record

LONE = "\udc80"
SHOWN = "\\udc80"
# Fields that identify or date a file, or that a reader parses.
KEPT = {
    *("lane", "started", "kind", "verdict", "id", "test", "rule", "better", "decision", "label", "record"),
    *("selection", "inputs", "sessions", "binding", "digests", "candidate"),
}
SOON = str(today() + timedelta(30))
WHO = ("--lane", "cpu", "--owner", "ada", "--reason", "upstream", "--expires", SOON, "--other-tree")


def with_lone_surrogates(raw: Any) -> Any:
    """Add one to each text that may be of the environment."""
    if isinstance(raw, dict):
        return {key: x if key in KEPT else with_lone_surrogates(x) for key, x in raw.items()}
    if isinstance(raw, list):
        return [x if x == BREAKS else with_lone_surrogates(x) for x in raw]
    return raw + LONE if isinstance(raw, str) and not raw.endswith(".json") else raw


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gate whose texts, and those of its records, have lone surrogates; its tree is the working directory."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    declare_lanes(tmp_path)
    monkeypatch.chdir(tmp_path)
    reviewed = {BREAKS: Reviewed(13, f"count{SHOWN}", "exact")}
    save(tmp_path / "baselines/cpu.json", Baseline("cpu", {"torch": "2.13.0", "triton": None}, reviewed))
    path = gate_of_day(tmp_path, 1)
    sides = {name: path.with_name(f"{name}.json") for name in ("adopted", "candidate")}
    for file in sides.values():
        save_record(file, with_lone_surrogates(json.loads(file.read_text())))
    raw = with_lone_surrogates(json.loads(path.read_text()))
    judge(state.parse(path, raw), {name: read_record(file) for name, file in sides.items()}).write(
        path.parent
    )
    return path


READ = [
    [["history", "add", "GATE", "RECORD"], ["history", BREAKS], ["findings", "list"], ["dashboard", "site"]],
    [["history", "add", "GATE"], ["notify", "--github", "o/r", "--dry-run"]],
    [["report", "GATE", "--html", "g.html", "--junit", "g.xml", "--markdown", "g.md"]],
    [["report", "RECORD", "--html", "r.html"]],
    [["rebaseline", "--lane", "cpu", "--record", "RECORD", "--other-tree", "--dry-run"]],
    [["accept", BREAKS, *WHO, "--record", "RECORD"]],
    [["accept", BREAKS, *WHO, "--record", "GATE"]],
]
REFUSED = [
    ["history", "add", f"{LONE}.json"],
    ["history", LONE],
    ["history", f"a/b/c{LONE}", "--lane", LONE],
    ["findings", "owner", LONE, "ada"],
    ["findings", "list", "--lane", LONE],
    ["accept", BREAKS, *WHO[:3], LONE, *WHO[4:], "--record", "RECORD"],
    ["accept", BREAKS, *WHO[:5], LONE, *WHO[6:], "--record", "RECORD"],
    ["notify", "--github", "o/r", "--dry-run", "--lane", LONE],
    ["report", LONE],
    ["gate", "--lane", LONE],
]


@pytest.mark.parametrize("lines", READ, ids=lambda lines: " ".join(lines[-1][:2]))
def test_command_reads_lone_surrogates(
    gate: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lines: list[list[str]]
) -> None:
    names = {"GATE": str(gate), "RECORD": str(gate.with_name("candidate.json"))}
    for line in lines:
        code = bumpgate(monkeypatch, *(names.get(word, word) for word in line))
        err = capfd.readouterr().err
        assert (code, "Traceback" in err) == (0, False), err


def test_option_with_lone_surrogate_is_no_traceback(
    gate: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bumpgate(monkeypatch, "history", "add", str(gate)) == 0
    capfd.readouterr()
    for line in REFUSED:
        arguments = [str(gate.with_name("candidate.json")) if word == "RECORD" else word for word in line]
        code = bumpgate(monkeypatch, *arguments)
        err = capfd.readouterr().err
        assert (code in (0, 4), len(err.splitlines()) <= 1) == (True, True), (line, err)


def test_binding_of_a_gate_with_such_a_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / f"{LONE}.py").write_text("X = 1\n")
    now = bind(tmp_path)
    assert Binding.from_json(loads(json.dumps(now.to_json()))).differences(now) == []


def test_loads_replaces_lone_surrogates_only() -> None:
    content = {"a": [f"x{LONE}", "\U0001f600", "\\udc80", 1.5, None], f"k{LONE}": 1}
    assert loads(json.dumps(content)) == {
        "a": [f"x{SHOWN}", "\U0001f600", "\\udc80", 1.5, None],
        f"k{SHOWN}": 1,
    }


def test_text_of_a_row_is_the_same_in_record_and_baseline(project: Project) -> None:
    called = (
        r"row.exact('compile/good/graph_breaks', '\udc80', 'breaks', evidence=['\udc81'], seen=3, rule='C6')"
    )
    project.tests(GOOD.replace('row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)', called))
    project.baseline(good=counted("test_good", SHOWN, "exact"))
    done = project.pytest("-m", "cpu", "-n", "0", PYTHONIOENCODING="utf-8")
    assert done.code == 0, done.out
    (judgement,) = read_record(project.root / "record.json").judgements
    assert (judgement.row.value, judgement.row.evidence) == (SHOWN, ("\\udc81",))


def test_record_of_an_environment_variable_is_added(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0", f"--record={LONE}.json", PYTHONIOENCODING="utf-8").code == 0
    (path,) = project.root.glob(f"{LONE}.json")
    assert LONE in json.loads(path.read_text())["provenance"]["command"]
    added = project.bumpgate("history", "add", str(path), "--store", f"sqlite:///{tmp_path}/h.sqlite")
    assert (added.code, added.err) == (0, ""), added.err
