"""Built kernel wheels by what they were built from and for: `PLACE/<package>/<key>/`, a wheel and wheel.json each.

The key is a hash of the sdist, the commit of torch, CUDA, the GPU architecture and Python. wheel.json has the wheel's
sha256, which every use checks.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from bumpgate.core.errors import one_fault
from bumpgate.core.rows import write_atomic
from bumpgate.env.locks import WHEEL
from bumpgate.env.store import StoreError, sha256_of
from bumpgate.process.home import home

NOTE = "wheel.json"


@dataclass(frozen=True)
class Build:
    """Inputs and target of a wheel build. sdist: sha256. torch_git: commit. cuda: "13.0". arch: 90 of sm_90.

    patch: sha256 of the edit of the sources, "" if there is none.
    """

    package: str
    version: str
    sdist: str
    torch: str
    torch_git: str
    cuda: str
    arch: int
    python: str
    patch: str = ""

    @property
    def key(self) -> str:
        """Return the hash of all that determines the binary, with the versions in front for the reader."""
        content = [self.package, self.sdist, self.torch_git, self.cuda, self.arch, self.python]
        content += [self.patch] if self.patch else []
        # The sdist states its version; without one, only the version distinguishes two builds.
        content += [] if self.sdist else [f"{self.package}=={self.version}"]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def kernel_store() -> Path:
    """Return the kernel store: $BUMPGATE_KERNELS, else kernels/ in `home()`."""
    chosen = os.environ.get("BUMPGATE_KERNELS")
    return Path(chosen).expanduser() if chosen else home() / "kernels"


def find(build: Build) -> Path | None:
    """Return the wheel of a build in the kernel store; None if it has none. Raises StoreError on a hash mismatch."""
    folder = kernel_store() / build.package / build.key
    note = folder / NOTE
    if not note.is_file():
        return None
    with one_fault(f"{note}: not a note of a wheel", StoreError, "delete it"):
        raw = json.loads(note.read_bytes())
        own, file, sha256 = Build(**raw["build"]), str(raw["file"]), str(raw["sha256"])
    if not WHEEL.fullmatch(file) or own.key != build.key:
        raise StoreError(
            f"{note}: of another build ({own.package} {own.version}, torch {own.torch}); delete it"
        )
    path = folder / file
    if not path.is_file() or sha256_of(path) != sha256:
        raise StoreError(f"{path}: does not match its {NOTE}; delete {folder} and build it again")
    return path


def put(build: Build, wheel: Path) -> Path:
    """Store a wheel, its note last: a wheel without one does not count."""
    folder = kernel_store() / build.package / build.key
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.name
    write_atomic(path, wheel.read_bytes())
    note = {"build": asdict(build), "file": wheel.name, "sha256": sha256_of(path)}
    write_atomic(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return path
