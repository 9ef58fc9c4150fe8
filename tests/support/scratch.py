"""A scratch copy of this repository in which documented commands are executed as written, by bash.

Its `bumpgate`, `pytest` and `python` are those of this interpreter over the copied sources. They install from a local
index with nearly empty wheels; the `pytest` wheel logs its arguments and fails.
The real pytest runs no test body: options, plugins, collection and workers are real.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bumpgate.core.baseline import judge, load
from bumpgate.core.rows import Judgement, Record, Row, Verdict, write_record
from bumpgate.env.request import lane_requirements
from bumpgate.gate.verdict import Side
from bumpgate.rebaseline import MADE_WITH
from bumpgate.run.binding import OWN, bind, measured_tree
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.reports import write_gate
from tests.support.tree import ROOT

SECONDS = 120  # of one command
PYTEST = """import os, sys
with open(os.environ["BUMPGATE_CHILD_LOG"], "a") as log:
    print(*sys.argv[1:], file=log)
sys.exit(3)
"""
NO_BODIES = """import os, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return True
def pytest_ignore_collect(collection_path, config):
    path = collection_path.relative_to(config.rootpath).as_posix()
    parts = os.environ["BUMPGATE_COLLECT"].split(",")
    return None if any(path.startswith(p) or p.startswith(path) for p in parts) else True
"""
CONSOLE = "#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
# Versions named in the documents, with a date for each. numpy 2 has no float_.
TORCH = {"2.12.0": "2026-01-05", "2.13.0": "2026-03-23", "2.14.0": "2026-10-01", "2.15.0": "2026-10-20"}
OTHERS = {
    "triton": ("3.6.0", "3.7.1", "3.9.0"),
    "numpy": ("1.24.0", "1.26.4", "2.0.0", "2.2.0"),
    "setuptools": ("75.0.0",),
}
AUTHOR = "-c user.name=test -c user.email=test@example.org"
# Rows of the cpu lane for the records below.
MOVED = "release/torchscript/deprecation_category"
GONE = "cache/layers-cpu/variables_exported"
GUARDS = "/guard_count"


@dataclass(frozen=True)
class Ran:
    """Exit code, output, and the arguments of each child of the fake pytest."""

    code: int
    output: str
    children: tuple[str, ...]


def wheels(folder: Path, root: Path) -> list[Path]:
    """Build a wheel of everything that the cpu lane installs, and of the versions above."""
    made = [fake_wheel(folder, "torch", v, "CPU = True\n") for v in TORCH]
    made += [fake_wheel(folder, "pytest", "9.0.0", {"pytest/__init__.py": "", "pytest/__main__.py": PYTEST})]
    for name, versions in OTHERS.items():
        made += [fake_wheel(folder, name, v, "float_ = float\n" * (v < "2")) for v in versions]
    named = {("torch", v) for v in TORCH}
    for text in lane_requirements(root, "cpu"):
        requirement = Requirement(text)
        version = next((s.version for s in requirement.specifier), "1.0")
        if requirement.name not in ("pytest", *OTHERS) and (requirement.name, version) not in named:
            made.append(fake_wheel(folder, requirement.name, version))
    return made


class Scratch:
    """home: base folder. root: the copied tree, committed. Raises CalledProcessError if the copy fails."""

    def __init__(self, home: Path, index: LocalIndex) -> None:
        self.home, self.root, self.bin = home, home / "tree", home / "bin"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in done.stdout.split("\0"):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.bin.mkdir()
        for name in ("bumpgate", "pytest"):
            (entry,) = {e.value for e in entry_points(group="console_scripts", name=name)}
            module, function = entry.split(":")
            self.program(name, CONSOLE.format(python=sys.executable, module=module, function=function))
        self.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self.bin / "no_bodies.py").write_text(NO_BODIES)
        self.index = index
        for wheel in wheels(home / "wheels", self.root):
            index.add(wheel)
        index.dates = {
            v: datetime.fromisoformat(day).replace(tzinfo=timezone.utc) for v, day in TORCH.items()
        }
        self.child_log = home / "children"
        dropped = ("PIP_", "UV_", "BUMPGATE_", "PYTEST_", "TORCH", "TRITON", "PYTHON", "GIT_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root),
            "XDG_CACHE_HOME": str(home / "cache"),
            "BUMPGATE_HOME": str(home / "home"),
            "BUMPGATE_CHILD_LOG": str(self.child_log),
            "UV_DEFAULT_INDEX": index.url,
            "UV_HTTP_RETRIES": "0",
            "UV_CACHE_DIR": str(home / "uv"),
            "TMPDIR": str(home),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        for line in (
            "git init -q",
            "bumpgate freeze --lane cpu",
            "git add -A",
            f"git {AUTHOR} commit -qm copy",
        ):
            done = self.run(line)
            assert done.code == 0, f"{line}: {done.output}"

    def program(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, line: str, *, collect: str = "") -> Ran:
        """Run one command line with bash in the tree. collect: parts of the tree that pytest only collects."""
        env = {"PYTEST_PLUGINS": "no_bodies", "BUMPGATE_COLLECT": collect} if collect else {}
        env |= {"PYTHONPATH": f"{self.root}{os.pathsep}{self.bin}"} if collect else {}
        self.child_log.unlink(missing_ok=True)
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=self.root,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{line}: not ended in {SECONDS} s\n{output}", pytrace=False)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        children = self.child_log.read_text().splitlines() if self.child_log.exists() else ()
        return Ran(process.returncode, output, tuple(children))

    def restore(self) -> None:
        """Restore the committed tree, with an empty history."""
        (self.home / "home" / "history.sqlite").unlink(missing_ok=True)
        done = self.run("git checkout -q . && git clean -fdxq -e __pycache__")
        assert done.code == 0, done.output

    def provide(self, files: Mapping[str, str]) -> None:
        """Create files that a command expects: name -> a file of the tree, or a name in MADE."""
        for name, source in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if source in MADE:
                MADE[source](path, self.root)
            else:
                shutil.copy(self.root / source, path)


def measured(root: Path, category: str = "") -> Record:
    """A complete run of the cpu lane: guard counts changed within tolerance, and one exact row reads `category`."""
    reviewed = load(root / "baselines/cpu.json", "cpu")
    values = {id: old.value + 1 for id, old in reviewed.rows.items() if id.endswith(GUARDS)}
    values[MOVED] = category or reviewed.rows[MOVED].value
    judged = []
    for id, value in values.items():
        old = reviewed.rows[id]
        row = Row(id, value, old.unit, 1, "R1", better=old.better, tolerance=old.tolerance, test=old.test)
        judged.append(judge(row, reviewed, failed_instruments={}))
    build = {name: reviewed.made_with.get(name) for name in MADE_WITH}
    run = {
        "lane": "cpu",
        "full_run": True,
        "tree": measured_tree(root, root / "record.json"),
        "started": "2026-03-02T03:00:00+00:00",
    }
    return Record(build | run, tuple(judged))


def lane_record(path: Path, root: Path) -> None:
    """Write a record where the exact row has changed, and one reviewed row is missing."""
    run = measured(root, "UserWarning")
    gone = Judgement(Row(GONE, None, "variables", 0, ""), Verdict.MISSING, "its test is gone", gone=True)
    write_record(path, run.provenance, (*run.judgements, gone))


def gate(path: Path, root: Path) -> None:
    """Write a finished gate of the cpu lane in this tree with HOLD for one exact row."""
    good = Side("torch 2.13.0", measured(root))
    write_gate(path.parent, good, Side("torch 2.14.0", measured(root, "UserWarning")))
    raw = json.loads(path.read_text())
    options = {"lane": "cpu", "candidate": "torch==2.14.0", "selection": []}
    # A command in the scratch tree runs the tree's own bumpgate.
    binding = replace(bind(root, path.parent), bumpgate=OWN).to_json()
    path.write_text(json.dumps(raw | {"finished": True, "config": options, "binding": binding}))


def kept_gate(path: Path, root: Path) -> None:
    """Write a gate of a build against itself, from the recorded ones."""
    kept = json.loads((root / "tools/recorded_sessions.json").read_text())[0]
    good, bad = ({"packages": {"torch": torch}} for torch in kept.pop("torch"))
    sessions = {"log_ratios": kept.pop("log_ratios")}
    path.write_text(json.dumps(kept | {"sides": {"good": good, "bad": bad}, "sessions": sessions}))


def interpreter(path: Path, root: Path, names: tuple[str, ...] = ("torch-2.13.0", "pytest")) -> None:
    """Create an environment with the wheels whose names begin with `names`."""
    folder = path.parents[1]
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for wheel in sorted((root.parent / "wheels").glob("*.whl")):
        if wheel.name.startswith(names):
            zipfile.ZipFile(wheel).extractall(site)


MADE = {
    "lane record": lane_record,
    "gate": gate,
    "kept gate": kept_gate,
    "interpreter": interpreter,
    "bare interpreter": partial(interpreter, names=()),
    "fails on torch 2.15": lambda path, root: path.write_text(
        "import torch\nraise SystemExit(torch.__version__ == '2.15.0')\n"
    ),
    "empty JUnit file": lambda path, root: path.write_text("<testsuites><testsuite/></testsuites>"),
}
