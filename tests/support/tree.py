"""Copies of this repository for injected faults, and lane runs inside them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.project import PLUGINS

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = (
    "bumpgate",
    "fixtures",
    "kernels",
    "launch",
    "model",
    "suites",
    "baselines",
    "lanes",
    "conftest.py",
    "pyproject.toml",
)
RUN_SECONDS = 420
# The canaries of the lanes cpu and h200.
CANARIES = "suites/canaries"


def copy_tree(target: Path) -> Path:
    """Copy the parts of the repository that a lane run reads to `target`.

    Python compiles a source again that is edited there. pytest's own bytecode names the files that it was made from,
    and a process may rename bytecode that it has just written.
    """
    left_out = shutil.ignore_patterns("*-pytest-*.pyc", "*.pyc.*")
    target.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=left_out)
        else:
            shutil.copy2(source, target / part)
    return target


def edit(root: Path, file: str, old: str, new: str) -> None:
    """Replace the only occurrence of `old`; a fault that no longer matches the code is an error, not a survivor."""
    path = root / file
    text = path.read_text()
    found = text.count(old)
    assert found == 1, f"{file}: the text to mutate occurs {found} times: {old!r}"
    path.write_text(text.replace(old, new))


@dataclass
class LaneRun:
    """Exit code, printed text and the judgements by row id of one lane run."""

    code: int
    output: str
    rows: dict[str, dict]

    def verdict(self, row: str) -> str:
        return self.rows[row]["verdict"] if row in self.rows else "(row absent)"


def run_lane(
    root: Path, *arguments: str, lane: str = "cpu", environment: dict[str, str] | None = None
) -> LaneRun:
    """Run `pytest -m lane` in `root`, by default in one process, and read its record."""
    record = root / "record.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", lane, "-n", "0", "-q", f"--record={record}", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "BUMPGATE_"))}
    env |= PLUGINS | (environment or {})
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=RUN_SECONDS)
    judgements = json.loads(record.read_text())["rows"] if record.exists() else []
    return LaneRun(done.returncode, done.stdout + done.stderr, {j["row"]["id"]: j for j in judgements})
