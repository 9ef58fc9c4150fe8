"""Runs any launcher and observes it from outside, and sets a launcher's variables for trainers in this process."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launch.contract import PATH, load
from launch.environment import child_environment
from suites.support.child import ROOT

OURS = "-m launch.train --smoke --preset nam12 --policy eager --steps 1 --batch 2 --tokens 16"
SECONDS = 300
TORCH = Version(version("torch"))

# Every Python process of the launcher runs this before its program. At exit, a process that has imported torch records
# the environment it was started with, and whether it initialized a device.
WITNESS = """
import atexit, json, os, sys
started = dict(os.environ)
def record():
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        with open(os.path.join(started["BUMPGATE_WITNESS"], f"{os.getpid()}.json"), "w") as file:
            json.dump({"environment": started, "device": torch.cuda.is_initialized()}, file)
atexit.register(record)
"""


def known(line: Mapping[str, Any]) -> bool:
    """Return whether this torch reads the variable of a contract's line; `torch` lists the versions that do."""
    return SpecifierSet(line.get("torch", "")).contains(TORCH, prereleases=True)


@dataclass(frozen=True)
class Launched:
    """code: the exit code. out, err: the output. trained: the witness record of each process that imported torch."""

    code: int
    out: str
    err: str
    trained: list[dict]

    @property
    def line(self) -> str:
        """Return the last line on standard error."""
        return (self.err.strip().splitlines() or [""])[-1]


class Launcher:
    """A command that starts a training run, in an environment that sets only the location of the caches."""

    def __init__(self, command: list[str], home: Path, cwd: Path = ROOT) -> None:
        self.command, self.home, self.cwd = command, home, cwd
        (home / "witness").mkdir(parents=True)
        (home / "witness" / "sitecustomize.py").write_text(WITNESS)

    def environment(self, planted: Mapping[str, str]) -> dict[str, str]:
        contract = load()
        ours = {*contract.reasons, "LOCAL_RANK", "BUMPGATE_RETRY"}
        clean = {name: value for name, value in os.environ.items() if name not in ours}
        path = os.pathsep.join(filter(None, [str(self.home / "witness"), clean.get("PYTHONPATH")]))
        paths = {"XDG_CACHE_HOME": str(self.home), "BUMPGATE_WITNESS": str(self.home / "witness")}
        return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **paths, **planted}

    def __call__(self, planted: Mapping[str, str] = {}, wrapper: tuple[str, ...] = ()) -> Launched:
        """Run the command with the planted variables, under `wrapper`."""
        done = subprocess.run(
            [*wrapper, *self.command],
            cwd=self.cwd,
            env=self.environment(planted),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        paths = list((self.home / "witness").glob("*.json"))
        trained = [json.loads(path.read_text()) for path in paths]
        for path in paths:
            path.unlink()
        return Launched(done.returncode, done.stdout, done.stderr, trained)


@pytest.fixture
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    """The command of --launcher, or our own trainer's smoke run."""
    command = request.config.option.launcher
    return Launcher(shlex.split(command) if command else [sys.executable, *OURS.split()], tmp_path / "home")


class Checkout:
    """A copy of the launcher and its contract that a test may edit; the code that it launches is shared."""

    def __init__(self, root: Path) -> None:
        self.root, self.contract = root, root / "launch" / PATH.name
        shutil.copytree(ROOT / "launch", root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("model", "kernels"):
            (root / name).symlink_to(ROOT / name)

    def edit(self, old: str, new: str) -> None:
        text = self.contract.read_text()
        assert text.count(old) == 1, old
        self.contract.write_text(text.replace(old, new))

    def lock(self) -> None:
        """Run the lock command that an error message names, as a reviewer would."""
        subprocess.run(
            "sha256sum launch/contract.toml > launch/contract.lock", shell=True, cwd=self.root, check=True
        )

    def launcher(self, *options: str) -> Launcher:
        command = [sys.executable, *OURS.split(), *options]
        return Launcher(command, self.root / "home", self.root)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "checkout").mkdir()
    return Checkout(tmp_path / "checkout")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that a launcher exports, for trainers in this process; torch has read its own at import."""
    contract = load()
    for name, value in child_environment(contract, os.environ).items():
        monkeypatch.setenv(name, value)
    for name in contract.cache_folders:
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
