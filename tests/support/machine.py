"""A machine for doctor to examine: a source tree, an environment and an interpreter that a test can break."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from bumpgate.doctor.checks import CHECKS
from bumpgate.doctor.examination import Check, CheckResult, Part, Status, examine, make_site
from tests.support.tree import ROOT, edit

# In every Python of the machine: log each import of torch, with its visible devices; finding its location does not
# count as an import. Not an audit hook: Dynamo would count its frames as the program's.
WITNESS = """
import os, sys
class Witness:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            with open({log!r}, "a") as file:
                file.write(repr(os.environ.get("CUDA_VISIBLE_DEVICES")) + "\\n")
sys.meta_path.insert(0, Witness())
"""
LANE, LOCK = "lanes/cpu/lane.toml", "lanes/cpu/pylock.toml"
COPIED = ("launch/contract.toml", "launch/contract.lock", "pyproject.toml")
LINKED = ("bumpgate", "kernels", "model", "suites", "conftest.py", "baselines")


@dataclass
class Machine:
    """home: all files of a test. packages: a directory that PYTHONPATH puts before the installed packages."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)

    def __post_init__(self) -> None:
        for name in COPIED:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        shutil.copytree(ROOT / "lanes", self.root / "lanes")
        for path in (*map(ROOT.joinpath, LINKED), *(ROOT / "launch").iterdir()):
            if not (link := self.root / path.relative_to(ROOT)).exists():
                link.symlink_to(path)
        self.packages.mkdir()
        (self.packages / "sitecustomize.py").write_text(WITNESS.format(log=str(self.home / "imports")))
        kept = {
            n: v
            for n, v in os.environ.items()
            if not n.startswith(("TORCH", "TRITON", "PYTHON", "NCCL", "CXX"))
        }
        ours = {
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "PYTHONPATH": str(self.packages),
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**kept, **ours}
        (self.home / "cache").mkdir()

    @property
    def root(self) -> Path:
        return self.home / "tree"

    @property
    def packages(self) -> Path:
        return self.home / "packages"

    def edit(self, name: str, old: str, new: str, *, lock: bool = False) -> None:
        """Replace the only occurrence of `old` in a copied file; `lock` updates its lock."""
        edit(self.root, name, old, new)
        path = self.root / name
        if lock:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            path.with_suffix(".lock").write_text(f"{digest}  {path.name}\n")

    def own(self, folder: str) -> None:
        """Replace the linked folder by a copy that can be edited, and each folder above it by links."""
        place, source = self.root, ROOT
        for part in Path(folder).parent.parts:
            place, source = place / part, source / part
            place.unlink()
            place.mkdir()
            for path in source.iterdir():
                (place / path.name).symlink_to(path)
        (self.root / folder).unlink()
        shutil.copytree(ROOT / folder, self.root / folder)

    def package(
        self, name: str, text: str = "", *, version: str = "", files: Mapping[str, str] = MappingProxyType({})
    ) -> Path:
        """Add a package before the installed ones, with installer metadata if it has a version."""
        place = self.packages / name
        place.mkdir()
        for file, content in {"__init__.py": text, **files}.items():
            (place / file).write_text(content)
        if version:
            info = self.packages / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
        return place

    def at_start(self, text: str) -> None:
        """Set code that every Python of the machine runs at startup."""
        with (self.packages / "sitecustomize.py").open("a") as file:
            file.write(text)

    def torch(self, version: str, cuda: str | None = None, text: str = "") -> None:
        """Install a fake torch that only has a version."""
        file = f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\ngit_version = 'abc'\n"
        self.package("torch", text, version=version, files={"version.py": file})

    def bare_python(self) -> None:
        """Use an interpreter with only the standard library."""
        venv.create(self.home / "bare", symlinks=True)
        self.python = self.home / "bare" / "bin" / "python"

    def program(self, name: str, text: str) -> Path:
        """Create an executable shell script, first on PATH."""
        path = self.home / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        self.environment["PATH"] = f"{path.parent}{os.pathsep}{self.environment['PATH']}"
        return path

    def examine(self, *parts: Part, lane: str = "cpu", checks: Sequence[Check] = CHECKS) -> list[CheckResult]:
        """Return doctor's findings, in `parts` only if given."""
        site = make_site(self.root, lane, self.python, self.environment)
        return examine(site, [check for check in checks if check.part in (parts or Part)])

    @property
    def torch_imports(self) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of each process that imported torch."""
        log = self.home / "imports"
        return log.read_text().split("\n")[:-1] if log.exists() else []


def defects(findings: Sequence[CheckResult]) -> list[str]:
    """Return the unique defect codes, in order."""
    return list(dict.fromkeys(f.code for f in findings if f.status is Status.DEFECT))
