"""The examples of docs/plugin.md and examples/ run as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.core.gate_file import GATE_SCHEMA
from bumpgate.core.rows import RECORD_SCHEMA, SCHEMA, read_record
from tests.support.foreign import DOCUMENT, EXAMPLES, LANE, Foreign
from tests.support.tree import ROOT

FIXTURES = ("row", "dynamo_watch", "inductor_watch", "canaries", "paired_timer", "exclusive_machine")


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", LANE)
    made.write("pytest.ini", "[pytest]\n")
    return made


@pytest.mark.parametrize("fixture", [*FIXTURES, "benchmark"])
def test_each_fixture_has_an_example(fixture: str) -> None:
    assert [text for text in EXAMPLES if re.search(rf"def test_\w+\([^)]*\b{fixture}\b", text)]


def test_documented_examples_can_be_reviewed(foreign: Foreign) -> None:
    """The first run of a row has no reviewed value; a row that contradicts its test is refused as one."""
    for number, text in enumerate(EXAMPLES):
        if "(benchmark)" not in text:  # tests/plugin/test_benchmark.py runs it
            foreign.write(f"test_{number}.py", text)
    ran = foreign.pytest("-m", "mine", "--gate")
    assert foreign.record().problems == (), ran.out + ran.err
    documented = set(re.findall(r'row\.\w+\(\s*"([^"]+/[^"]+)"', DOCUMENT))
    paired = {"speed/matmul/step_seconds", "start/json/wall_seconds"}
    assert foreign.verdicts() == {id: "PASS" if id in paired else "NEW" for id in documented}
    accepted = foreign.bumpgate("rebaseline", "--lane", "mine")
    assert accepted.code == 0, accepted.err
    assert (
        json.loads((foreign.root / "baselines/mine.json").read_text())["rows"].keys() == documented - paired
    )


def test_documented_schema_is_current() -> None:
    for files, number in (
        ("record.json", RECORD_SCHEMA),
        ("gate.json", GATE_SCHEMA),
        ("baselines/*.json", SCHEMA),
    ):
        verb = "state" if "*" in files else "states"
        assert f'`{files}` {verb} `"schema": {number}`' in DOCUMENT


def test_watched_rows_fail_with_their_instrument(foreign: Foreign) -> None:
    (text,) = [text for text in EXAMPLES if "dynamo_watch" in text]
    foreign.write("test_breaks.py", text)
    ran = foreign.pytest("-m", "mine", TORCHDYNAMO_DISABLE="1")
    assert ran.code == 1, ran.out
    assert set(foreign.verdicts().values()) == {"INSTRUMENT"}
    assert "instrument graphs: CanaryError" in ran.out


def test_tiny_example_is_green_and_its_rows_can_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/tiny", tmp_path, dirs_exist_ok=True)
    foreign = Foreign(tmp_path)
    ran = foreign.pytest("-m", "tiny", "--gate")
    assert ran.code == 0, ran.out + ran.err
    rows = foreign.verdicts()
    assert len(rows) == 6
    assert {*rows.values()} == {"PASS"}
    reviewed = json.loads((tmp_path / "baselines/tiny.json").read_text())["rows"]
    assert reviewed.keys() == rows.keys() - {"train/tiny/step_seconds"}
    model = tmp_path / "tiny.py"
    broken = model.read_text().replace("x = x + self.out(", "print(end='')\n        x = self.out(")
    assert broken != model.read_text()
    model.write_text(broken)
    ran = foreign.pytest("-m", "tiny", "-k", "graph or loss")
    assert ran.code == 1
    red = {id: verdict for id, verdict in foreign.verdicts().items() if verdict != "PASS"}
    assert "torch.__trace" not in ran.out, "pytest does not show torch's trace log"
    assert red["compile/tiny/graph_breaks"] == red["train/tiny/loss"] == "REGRESSION"


LAUNCHER = "examples/launcher/launch.sh"


def judge_launcher(tmp_path: Path, script: Path, selection: str) -> dict[str, str]:
    """Run the launcher's tests of this repository on a launcher; return row id -> displayed verdict."""
    record = tmp_path / "record.json"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TMPDIR": str(tmp_path)}
    line = f"-m pytest -m cpu -n 0 suites/launch/test_environment.py --record={record}"
    done = subprocess.run(
        [sys.executable, *line.split(), "-k", selection, "--launcher", f"bash {script}"],
        cwd=ROOT,
        env={name: value for name, value in environment.items() if not name.startswith("BUMPGATE_")},
        capture_output=True,
        text=True,
    )
    found = {j.row.id: j.label for j in read_record(record).judgements}
    assert done.returncode == (set(found.values()) not in ({"PASS"}, set())), done.stdout + done.stderr
    return found


def test_example_launcher_exports_and_refuses(tmp_path: Path) -> None:
    assert f'--launcher "bash {LAUNCHER}"' in DOCUMENT
    found = judge_launcher(tmp_path, ROOT / LAUNCHER, "refuses_every or before_python")
    assert len(found) == 6


def test_launcher_that_misses_a_switch_is_red(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/launcher", tmp_path / "launcher")
    script = tmp_path / "launcher/launch.sh"
    text = script.read_text()
    assert text.count(" TORCHDYNAMO_DISABLE ") == 1
    script.write_text(text.replace(" TORCHDYNAMO_DISABLE ", " "))
    found = judge_launcher(tmp_path, script, "refuses_every")
    red = [row for row, verdict in found.items() if verdict != "PASS"]
    assert red == ["launch/environment-cpu-C32/violations_refused"]
