"""Semantic mutants: edits that a refactoring could make, each of which the tests nearest to it must notice.

Each `*.toml` of this folder lists the mutants of one part of the repository. A mutant is planted in a copy of the tree,
and its tests run there until the first failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.toml import tomllib
from tests.support.tree import ROOT

SECONDS = 500
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class SemanticMutant:
    """One edit.

    part: name of its TOML file.
    before: text that occurs exactly once in `file`; after: what replaces it.
    breaks: what a user would suffer from.
    tests: paths or node ids for pytest; with a lane, those of `pytest -m lane`.
    """

    part: str
    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]
    lane: str = ""

    def mutated(self, text: str) -> str:
        """Return the edited text of its file. Raises AssertionError (one line) on a mutant that is stale."""
        found = text.count(self.before)
        assert found == 1, (
            f"stale mutant {self.part}/{self.name}: its text occurs {found} times in {self.file}"
        )
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Run:
    """code: the exit code of pytest. failure: the first failed test and its message. seconds: its time."""

    code: int
    failure: str
    seconds: float


def load_mutants() -> list[SemanticMutant]:
    """Read the mutants of every part."""
    return [
        SemanticMutant(path.stem, **raw | {"tests": tuple(raw["tests"])})
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for raw in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]


class Copy:
    """A clone of the repository with the changes of the work tree, in which one mutant at a time is planted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unchanged: dict[tuple[str, ...], Run] = {}
        self.edits = 0
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")[:-1]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, root / name)
            else:
                (root / name).unlink(missing_ok=True)

    def survived(self, mutant: SemanticMutant) -> tuple[str, Run]:
        """Plant a mutant and run its tests -> why it is not killed, "" if it is; and the run."""
        run = self._planted(mutant)
        if run.code == 0:
            return f"no test failed: {mutant.breaks}", run
        if run.code != 1:
            return f"pytest ended with {run.code}: {run.failure}", run
        key = (mutant.lane, *mutant.tests)
        if key not in self.unchanged:
            self.unchanged[key] = self._pytest(mutant.tests, mutant.lane)
        right = self.unchanged[key]
        return (f"red without it, too: {right.failure}" if right.code else ""), run

    def _planted(self, mutant: SemanticMutant) -> Run:
        path = self.root / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.mutated(text))
        try:
            return self._pytest(mutant.tests, mutant.lane)
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Write a source with a new time: Python compiles a source again only if its size or second differs."""
        path.write_text(text, encoding="utf-8")
        self.edits += 1
        os.utime(path, (time.time() + 2 * self.edits,) * 2)

    def _pytest(self, tests: Sequence[str], lane: str) -> Run:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=short", *tests]
        command += ["-m", lane, f"--record={self.root / 'mutant-record.json'}"] if lane else []
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "BUMPGATE_"))}
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=clean | {"PYTHONPATH": str(self.root)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
            found = FAILED.search(done.stdout)
            code, failure = done.returncode, found[1] if found else (done.stdout + done.stderr)[-300:]
        except subprocess.TimeoutExpired:
            code, failure = 1, f"no end in {SECONDS} s"
        return Run(code, failure, time.monotonic() - started)
