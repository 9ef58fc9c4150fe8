"""PEP 751 lock files of a lane, `lanes/<lane>/pylock.toml`: read, checked, and written in a form that names no host.

Each wheel carries its file name, its sha256 and a path below `store/`; no URL and no index. An installer finds the
file in the wheel store or through the index settings of its own host, and the hash verifies it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core.errors import BumpgateError, is_line, one_fault
from bumpgate.core.lanes import FOLDER
from bumpgate.core.toml import tomllib

# A file's name without folders and line ends: it becomes a path of the store and a line of a Containerfile.
WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl")
SHA256 = re.compile(r"[0-9a-f]{64}")
FIX = "bumpgate freeze writes it"
Table = Mapping[str, Any]


class LockError(BumpgateError):
    """A lock file that cannot be read or does not pin what it names."""


@dataclass(frozen=True)
class Wheel:
    """One wheel file. sha256: 64 hexadecimal digits."""

    file: str
    sha256: str

    @property
    def path(self) -> str:
        """Path below a wheel store; it has the hash, so that files of the same name do not collide."""
        return f"{self.sha256}/{self.file}"


@dataclass(frozen=True)
class Locked:
    """One package of a set."""

    name: str
    version: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True)
class Lock:
    """A complete set. python: "3.11", the interpreter version of its wheels; "" if the file does not state it."""

    packages: tuple[Locked, ...]
    python: str = ""
    environments: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """Package name to version."""
        return {p.name: p.version for p in self.packages}


def read_lock(path: Path) -> Lock:
    """Read a lock. Raises LockError (one line) if the file is missing or invalid, or a wheel has no sha256."""
    # The file of a lane is called as those of all lanes are.
    name = "/".join(path.parts[-3:]) if path.parts[-3:-2] == (FOLDER,) else path.name
    with one_fault(f"{name}: cannot be read", LockError, FIX):
        text = path.read_text(encoding="utf-8")
    packages = tuple(package for package, _ in parse_lock(name, text))
    raw = _parsed(name, text)
    python = re.fullmatch(r"==(\d+\.\d+)\.\*", str(raw.get("requires-python", "")))
    return Lock(packages, python[1] if python else "", tuple(map(str, raw.get("environments", ()))))


def parse_lock(name: str, text: str) -> list[tuple[Locked, dict[Wheel, str]]]:
    """Return the packages of a lock (ours or uv's), and the URL or path of each wheel. Raises LockError."""
    with one_fault(f"{name}: not a lock file", LockError, FIX):
        return [_locked(name, entry) for entry in _parsed(name, text)["packages"]]


def pins(path: Path) -> list[str] | None:
    """Return the lines of a requirements file that installs a lock with `--require-hashes`.

    None if a file has no sha256, or a package has only a source file. Versions are pinned by ===: == also matches a
    build of the same version with a local label, which an index or a folder may hold too. Raises LockError.
    """
    lines = []
    for entry in _entries(path):
        digests = _digests(entry)
        if not all(map(SHA256.fullmatch, digests or [""])):
            return None
        what = f"{entry['name']}==={entry['version']}" if "version" in entry else str(entry["name"])
        if archive := entry.get("archive"):
            url = archive.get("url") or (path.parent / archive["path"]).resolve().as_uri()
            what = f"{entry['name']} @ {url}"
        marker = f" ; {entry['marker']}" if "marker" in entry else ""
        lines.append(" ".join([what + marker, *(f"--hash=sha256:{digest}" for digest in digests)]))
    return lines


def wheel_sizes(path: Path) -> dict[tuple[str, str], int]:
    """Return (package, version) -> bytes of its largest wheel, of those whose size the lock states."""
    return {
        (canonicalize_name(entry["name"]), str(entry.get("version", ""))): max(
            (int(file.get("size", 0)) for file in _files(entry)), default=0
        )
        for entry in _entries(path)
    }


def file_digests(path: Path) -> dict[str, list[str]]:
    """Return package -> sha256 of each of its files in a lock (ours or uv's). Raises LockError."""
    return {canonicalize_name(entry["name"]): _digests(entry) for entry in _entries(path)}


def _entries(path: Path) -> list[Table]:
    return list(_parsed(path.name, path.read_text(encoding="utf-8"))["packages"])


def _parsed(name: str, text: str) -> dict[str, Any]:
    """Parse a lock, ours or uv's. A name in it becomes a path, a line of a requirements file or of a Containerfile."""
    with one_fault(f"{name}: not a lock file", LockError, FIX):
        raw = tomllib.loads(text)
        if raw.get("lock-version") != "1.0":
            raise LockError(f"{name}: not a lock file of version 1.0 (PEP 751); {FIX}")
        for entry in raw["packages"]:
            package = canonicalize_name(entry["name"], validate=True)
            Version(entry.get("version", "0"))
            texts = [entry.get("marker", "-")]
            for file in _files(entry):
                texts += [str(file.get("url", "-")).replace(" ", "\n"), str(file.get("path", "-"))]
            if not all(map(is_line, texts)):
                raise ValueError(f"a marker, path or URL of {package} is not one line")
    return dict(raw)


def _files(entry: Table) -> list[Table]:
    """Return the wheels of an entry. A requirement on a wheel file is listed as an archive."""
    return [*entry.get("wheels", ()), *([entry["archive"]] if "archive" in entry else ())]


def _digests(entry: Table) -> list[str]:
    return sorted(str(file.get("hashes", {}).get("sha256", "")) for file in _files(entry))


def _locked(name: str, entry: Table) -> tuple[Locked, dict[Wheel, str]]:
    package, version = canonicalize_name(entry["name"]), str(entry["version"])
    places = {}
    for raw in _files(entry):
        place, sha256 = str(raw.get("url") or raw["path"]), raw.get("hashes", {}).get("sha256", "")
        last = place.rsplit("/", 1)[-1]
        file = str(raw.get("name") or (unquote(last) if "url" in raw else last))
        if not WHEEL.fullmatch(file) or parse_wheel_filename(file)[0] != package:
            raise LockError(f"{name}: {file!r} is not the name of a wheel of {package}; {FIX}")
        if not SHA256.fullmatch(sha256):
            raise LockError(f"{name}: {package} {version} has a wheel without its sha256; freeze again")
        places[Wheel(file, sha256)] = place
    if not places:
        raise LockError(f"{name}: {package} {version} has no wheel; only wheels can be gated")
    return Locked(package, version, tuple(places)), places


def lock_text(lock: Lock) -> str:
    """Format a lock in the committed form, packages sorted by name."""
    lines = ['lock-version = "1.0"']
    if lock.environments:
        lines.append(f"environments = {json.dumps(list(lock.environments))}")
    if lock.python:
        lines.append(f'requires-python = "=={lock.python}.*"')
    lines.append('created-by = "bumpgate"')
    for package in sorted(lock.packages, key=lambda p: p.name):
        lines += [
            "",
            "[[packages]]",
            f'name = "{package.name}"',
            f'version = "{package.version}"',
            "wheels = [",
        ]
        lines += [
            f'  {{ name = "{w.file}", path = "store/{w.path}", hashes = {{ sha256 = "{w.sha256}" }} }},'
            for w in sorted(package.wheels, key=lambda w: w.file)
        ]
        lines.append("]")
    return "\n".join(lines) + "\n"
