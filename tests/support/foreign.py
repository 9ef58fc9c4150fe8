"""A repository other than this one, and the commands that its users run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.forked import run_pytest
from tests.support.project import COMMAND, Folder, Result
from tests.support.tree import ROOT

# Rounds of timed tests are kept whatever else runs, and their clocks count how often they are read.
ANY_ROUND_IS_QUIET = """
import itertools, math, time
from types import SimpleNamespace
from bumpgate.plugin import timing
timing.FOREIGN_SHARE = math.inf
timing._waited_seconds = lambda: 0.0
read = itertools.count(1.0).__next__
timing.time = SimpleNamespace(monotonic=time.monotonic, process_time=read, perf_counter=read)
"""
LANE = "[lanes.mine]\ndevice = 'cpu'\n"
SECONDS = 540
# The examples of docs/plugin.md: a test module each.
DOCUMENT = (ROOT / "docs/plugin.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


class Foreign(Folder):
    """root: the repository. Commands import bumpgate from this tree, and pytest loads no other plugin than its."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("conftest.py", ANY_ROUND_IS_QUIET)
        (root / ".tmp").mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "BUMPGATE_", "TORCH"))}
        self.env = kept | {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # The machine's lock, and the user's own durations, are not those of a test.
            "TMPDIR": str(root / ".tmp"),
            "BUMPGATE_HOME": str(root / ".tmp/home"),
            "OMP_NUM_THREADS": "1",
        }

    def pytest(self, *args: str, **env: str) -> Result:
        """Run pytest in a fork; a variable that Python reads when it starts needs a process of its own."""
        options = ("-p", "bumpgate.plugin", "-p", "no:cacheprovider", *args)
        if any(name.startswith("PYTHON") for name in env):
            return self._run("-m", "pytest", *options, **env)
        return Result(*run_pytest(self.root, options, self.env | env))

    def bumpgate(self, *args: str, **env: str) -> Result:
        return self._run("-c", COMMAND, *args, **env)

    def _run(self, *args: str, **env: str) -> Result:
        command, env = [sys.executable, *args], self.env | env
        done = subprocess.run(
            command, cwd=self.root, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def verdicts(self) -> dict[str, str]:
        """Map row id -> displayed verdict of the last record."""
        return {j.row.id: j.label for j in self.record().judgements}
