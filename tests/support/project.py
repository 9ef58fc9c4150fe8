"""Small projects that link to the row machinery, and pytest runs in them, as a user runs it.

Each project has a fake torch: nothing here needs the real one, and tests can check that a session does not import it.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.rows import Record, read_record
from tests.support.forked import run_pytest
from tests.support.lane_files import declare_lanes

REPO = Path(__file__).parents[2]
# Plugins required by pyproject.toml; other installed plugins only cost start-up time.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
# Each gate compiles the sources of both interpreters again, a second per side. With these, they read the bytecode that
# exists.
EXISTING_BYTECODE = {"PYTHONPYCACHEPREFIX": "", "PYTHONDONTWRITEBYTECODE": "1"}

# Python's program for the command bumpgate.
COMMAND = "from bumpgate.cli import main; main()"
HEAD = """
import os, signal, time
from types import SimpleNamespace
import pytest
from suites.support.lanes import lanes
from bumpgate.plugin.rows import CANARY_RESULTS, INSTRUMENTS, InfraError
COUNT = dict(unit="breaks", seen=3, rule="C6")
TIMED = dict(unit="s", seen=3, rule="C37", tolerance=0.1)

def at(median, low, high):
    return SimpleNamespace(median=median, low=low, high=high)
"""

GOOD = """
@lanes("cpu")
def test_good(lane, row):
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)
"""


def interruptible() -> None:
    """Restore SIGINT: a runner started in the background ignores it, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds. It fails if the process has ended before, or after five minutes."""
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "the condition did not hold within five minutes"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def spawn(folder: Path, env: Mapping[str, str], *args: str) -> subprocess.Popen[str]:
    """Start Python in a folder, as the leader of a session of its own."""
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=interruptible,
    )


def wrapped_python(
    bytecode: Mapping[str, str] = EXISTING_BYTECODE, site: Path | None = None, **variables: str
) -> str:
    """Return a script that runs this Python with these env_vars, with only the plugins that pyproject.toml requires.

    site: a folder of further packages.
    """
    given = {**PLUGINS, **bytecode, **variables}
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    path = f'PYTHONPATH="$PYTHONPATH:{site}" ' if site else ""
    return f'#!/bin/sh\n{assignments} {path}exec "{sys.executable}" "$@"\n'


def package_of_side(folder: Path, side: str) -> Path:
    """Create a folder with the package `bump`, whose version is another one on each side of a gate."""
    version = "1.0" if side == "adopted" else "2.0"
    info = folder / f"bump-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bump\nVersion: {version}\n")
    return folder


@dataclass(frozen=True)
class Result:
    """Exit code and output of one run."""

    code: int
    out: str
    err: str


def in_process(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Result:
    """Run bumpgate in this process, in a folder; env replaces the environment variables."""
    from bumpgate import cli  # not in every lane's environment

    out, err = io.StringIO(), io.StringIO()
    given = nullcontext() if env is None else mock.patch.dict(os.environ, env, clear=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), given:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["bumpgate", *args])
        if env is not None:
            patch.setattr(tempfile, "tempdir", None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


class Folder:
    """A repository of a test, and the record of its last lane run."""

    root: Path

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def record(self) -> Record:
        return read_record(self.root / "record.json")


class Project(Folder):
    """A directory with the row machinery, a fake torch, and tests given as text."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[str]] = []
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(REPO / name, root / name)
        declare_lanes(root)
        self.write("suites/__init__.py", "")
        # Links, so that the compiled modules are shared between projects.
        for name in ("bumpgate", "suites/support"):
            (root / name).symlink_to(REPO / name)
        self.write("torch/version.py", "__version__ = '9.9.0'\ngit_version = 'f00d'\n")
        self.write("torch/__init__.py", "open('torch-was-imported', 'w')\n")
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHINDUCTOR", "BUMPGATE"))
        }
        self.env |= PLUGINS
        # The machine's lock, the durations of the user's own lanes and his compiled objects are not those of a test.
        own = root.with_name(f"{root.name}-own")
        own.mkdir(exist_ok=True)
        self.env |= {"TMPDIR": str(own)}
        self.env |= {f"BUMPGATE_{name}": str(own / name.lower()) for name in ("HOME", "OBJECTS")}
        # A fake torch rewritten within a second with the same length would be loaded from stale bytecode.
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"

    def workers(self, number: int) -> None:
        """Run lanes with this number of workers, each of which takes longer to start than the tests here."""
        text = (self.root / "pyproject.toml").read_text()
        assert text.count(" -n auto ") == 1
        self.write("pyproject.toml", text.replace(" -n auto ", f" -n {number} "))

    def tests(self, body: str, path: str = "suites/compile/test_a.py") -> None:
        self.write(path, HEAD + textwrap.dedent(body))

    def baseline(self, **rows: Reviewed) -> None:
        """Write the baseline; rows by case, with the suite and the metric of COUNT."""
        made_with = {"torch": "9.9.0", "triton": None}
        rows_by_id = {f"compile/{case}/graph_breaks": reviewed for case, reviewed in rows.items()}
        save(self.root / "baselines/cpu.json", Baseline("cpu", made_with, rows_by_id))

    def start(self, *args: str, cwd: str = ".", **env: str) -> subprocess.Popen[str]:
        self.processes.append(spawn(self.root / cwd, self.env | env, *args))
        return self.processes[-1]

    def end(self) -> None:
        """Kill processes left by a failed test, including workers."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def pytest(self, *args: str, cwd: str = ".", **env: str) -> Result:
        """Run pytest in a fork; a variable that Python reads when it starts needs a process of its own."""
        if not any(name.startswith("PYTHON") for name in env):
            return Result(*run_pytest(self.root / cwd, args, self.env | env))
        process = self.start("-m", "pytest", *args, cwd=cwd, **env)
        out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def bumpgate(self, *args: str) -> Result:
        """Run the command in this process, except for a gate, which ends with its process."""
        if args[0] != "gate":
            return in_process(self.root, *args, env=self.env)
        process = self.start("-c", COMMAND, *args)
        out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def verdicts(self) -> dict[str, str]:
        """Map case -> displayed verdict of every row of the last record."""
        return {j.row.id.split("/")[1]: j.label for j in self.record().judgements}

    def reason(self, case: str) -> str:
        return next(j.reason for j in self.record().judgements if j.row.id.split("/")[1] == case)


def counted(test: str, value: object = 13, better: str = "derived") -> Reviewed:
    """Return a reviewed row as reported by COUNT."""
    return Reviewed(value, "breaks", better, test=f"suites/compile/test_a.py::{test}[cpu]")
