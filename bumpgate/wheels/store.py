"""Built kernel wheels by what they were built from and for: `PLACE/<package>/<key>/`, a wheel and wheel.json each.

The key is a hash of the sdist, the commit of torch, CUDA, the GPU architecture and Python, so a place needs no list of
its contents: it may be a directory, or the address of one that a web server shows. wheel.json has the wheel's sha256,
and every copy is hashed on its way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bumpgate.core.errors import one_line
from bumpgate.core.rows import write_atomic
from bumpgate.core.text import redacted
from bumpgate.env.freeze import blocks
from bumpgate.env.store import StoreError, sha256_of
from bumpgate.env.uv import http_options, local_path
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


@dataclass(frozen=True)
class Stored:
    """A wheel of a store. path: in a local store; sha256: of the file, as wheel.json has it."""

    path: Path
    sha256: str


def kernel_store() -> Path:
    """Return the kernel store: $BUMPGATE_KERNELS, else kernels/ in `home()`."""
    chosen = os.environ.get("BUMPGATE_KERNELS")
    return Path(chosen).expanduser() if chosen else home() / "kernels"


def find(build: Build, root: Path | None = None) -> Stored | None:
    """Return the wheel of a build in a local store; None if it has none. Raises StoreError on a hash mismatch."""
    folder = (root or kernel_store()) / build.package / build.key
    if not (folder / NOTE).is_file():
        return None
    file, sha256 = _note((folder / NOTE).read_bytes(), build, str(folder / NOTE))
    path = folder / file
    if not path.is_file() or sha256_of(path) != sha256:
        raise StoreError(f"{path}: does not match its {NOTE}; delete {folder} and fetch or build it again")
    return Stored(path, sha256)


def put(build: Build, wheel: Path, root: Path | None = None) -> Stored:
    """Store a wheel, its note last: a wheel without one does not count."""
    folder = (root or kernel_store()) / build.package / build.key
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.name
    partial = folder / f".{wheel.name}.{os.getpid()}.partial"
    try:
        shutil.copyfile(wheel, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    stored = Stored(path, sha256_of(path))
    note = {"build": asdict(build), "file": wheel.name, "sha256": stored.sha256}
    write_atomic(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return stored


def fetch(build: Build, place: str, root: Path | None = None) -> Stored | None:
    """Copy the wheel of a build from another store, a directory or an https URL; None if that has none.

    Raises StoreError on an unreachable store and on a hash mismatch, BumpgateError on a broken connection.
    """
    source = f"{place.rstrip('/')}/{build.package}/{build.key}"
    raw = b"".join(_read(f"{source}/{NOTE}") or ())
    if not raw:
        return None
    file, sha256 = _note(raw, build, redacted(f"{source}/{NOTE}"))
    folder = root or kernel_store()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{build.key}.{os.getpid()}"
    partial.mkdir()
    try:
        with (partial / file).open("wb") as f:
            for block in _read(f"{source}/{file}") or ():
                f.write(block)
        found = sha256_of(partial / file)
        if found != sha256:
            raise StoreError(
                f"{redacted(source)}/{file}: sha256 {found[:12]}..., its {NOTE} has {sha256[:12]}...; build it again"
            )
        return put(build, partial / file, root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _note(raw: bytes, build: Build, where: str) -> tuple[str, str]:
    """File name and sha256 of a wheel.json. Raises StoreError if it is not of this build."""
    try:
        note = json.loads(raw)
        own, file, sha256 = Build(**note["build"]), str(note["file"]), str(note["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where}: not a note of a wheel ({one_line(error, 80)}); delete it") from None
    if own.key != build.key or Path(file).name != file:
        raise StoreError(
            f"{where}: of another build ({own.package} {own.version}, torch {own.torch}); delete it"
        )
    return file, sha256


def _read(address: str) -> Iterator[bytes] | None:
    """Return the bytes of a file or URL in blocks, or None if it does not exist."""
    if path := local_path(address):
        return blocks(address) if path.is_file() else None
    import requests

    try:
        if requests.head(address, allow_redirects=True, **http_options()).status_code == 404:
            return None
    except requests.RequestException as error:
        raise StoreError(f"{redacted(address)} cannot be fetched: {one_line(error, 120)}") from None
    return blocks(address)
