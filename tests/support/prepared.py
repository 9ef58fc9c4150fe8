"""A miniature tree whose lane has two kernel wheels, and interpreters that a user has prepared for a gate.

fast and faster 1.0 exist in two builds for torch 9.9 (folders `old`, `again`) and one for 9.11 (`new`), under the same
file names.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from bumpgate.env.store import sha256_of
from bumpgate.env.uv import find_uv
from tests.support.adopting import LANE, AdoptTree
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.project import Result

KERNELS = ("fast", "faster")
PEERS = """
from suites.support.absent import not_run

@lanes("cpu")
@pytest.mark.parametrize("name", ["fast", "faster"])
def test_peer(lane, name, row):
    if reason := not_run(row, lane, [f"kernels/{name}/over_peer"], [name]):
        pytest.skip(f"not run: {reason}")
    row.exact(f"kernels/{name}/over_peer", __import__(name).SPEED, "ratio", seen=1, rule="R1")
"""
TABLES = """
[wheels.fast]
version = "1.0"
torch = "9.9.0"
sha256 = "{sha256}"
sdist = "{sdist}"  # from PyPI

[wheels.faster]
version = "1.0"
torch = "9.9.0"

[wheels.faster.smoke]
command = ["-m", "faster"]
device = "cuda"
cases = ["a"]
"""
EXTRA = """cpu = [
    { include-group = "suite" },
    "torch==9.9.0", # the adopted one
    "fast==1.0",
    "faster==1.0",
]"""
SDIST = "5" * 64


def kernel_wheels(folder: Path) -> None:
    """Write the builds of both kernel wheels below `folder`, each pinned to its torch; and a later version of one."""
    for build, torch in (("old", "9.9"), ("again", "9.9"), ("new", "9.11")):
        for name in KERNELS:
            text = f"SPEED = 2\nBUILD = {build!r}\n"
            fake_wheel(folder / build, name, "1.0", text, requires=[f"torch=={torch}.*"])
    fake_wheel(folder / "later", "fast", "1.1", "SPEED = 2\n", requires=["torch"])


class PreparedTree(AdoptTree):
    """A tree with a frozen lane of two kernel wheels; `kernels` holds the wheels of each build."""

    def __init__(self, root: Path, index: LocalIndex, home: Path) -> None:
        super().__init__(root, index, home)
        self.kernels = home / "kernels"
        kernel_wheels(self.kernels)
        tables = TABLES.format(sha256=sha256_of(self.wheel("old", "fast")), sdist=SDIST)
        self.write("lanes/cpu/lane.toml", LANE + tables)
        project = (root / "pyproject.toml").read_text()
        self.write(
            "pyproject.toml", project.replace('cpu = [{ include-group = "suite" }, "torch==9.9.0"]', EXTRA)
        )
        self.tests(PEERS, "suites/kernels/test_peers.py")
        path = root / "baselines/cpu.json"
        was = load(path, "cpu")
        rows = {
            f"kernels/{name}/over_peer": Reviewed(
                2, "ratio", "exact", test=f"suites/kernels/test_peers.py::test_peer[{name}-cpu]"
            )
            for name in KERNELS
        }
        save(path, Baseline("cpu", was.made_with, {**was.rows, **rows}))
        frozen = self.bumpgate("freeze", "--lane", "cpu", "--find-links", str(self.kernels / "old"))
        assert frozen.code == 0, frozen.err

    def wheel(self, build: str, name: str) -> Path:
        return self.kernels / build / f"{name}-1.0-py3-none-any.whl"

    def copy(self, root: Path, home: Path) -> PreparedTree:
        made = super().copy(root, home)
        assert isinstance(made, PreparedTree)
        made.kernels = self.kernels
        return made

    def interpreter(self, name: str, *packages: str | Path) -> Path:
        """Return an interpreter with these packages, next to the tree."""
        place = self.root.parent / name
        for command in (
            ("venv", "--quiet", "--python", sys.executable, place),
            ("pip", "install", "--quiet", "--python", place / "bin/python", "pytest==99.0", *packages),
        ):
            subprocess.run([find_uv(), *command], env=self.env, check=True, capture_output=True)
        return place / "bin/python"

    def gate_interpreters(self, good: Path, bad: Path, out: str, *more: str) -> Result:
        sides = ("--python-adopted", str(good), "--python-candidate", str(bad))
        return self.bumpgate("gate", "--lane", "cpu", *sides, "--out", out, *more)
