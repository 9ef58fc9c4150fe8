"""Environments: an interpreter with one package set, built by uv, cached by content, created atomically.

`build` resolves and installs next to the cache and renames the result into it. A process that uses an environment
holds a shared lock on it until it exits, so that `bumpgate environments --prune` never removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.core.errors import one_line
from bumpgate.core.rows import write_atomic
from bumpgate.env.cached import NOTE, Say, lock_file
from bumpgate.env.installation import RESOLUTION, BuildError, Installation, NotInstallable
from bumpgate.env.lane import lane_request
from bumpgate.env.request import SCHEMA, Request, check_request, request_key, without_url
from bumpgate.process.home import home

__all__ = [
    "BuildError",
    "Environment",
    "NotInstallable",
    "Request",
    "build",
    "lane_request",
    "release",
    "resolve",
]


@dataclass(frozen=True)
class Environment:
    """A built environment. python: its interpreter. packages: canonical name to version. lock: uv's resolution."""

    name: str
    python: Path
    key: str
    packages: Mapping[str, str] = field(default_factory=dict)
    lock: Path | None = None


def build(request: Request, *, root: Path | None = None, say: Say = lambda line: None) -> Environment:
    """Return the environment of a request, cached or newly built. root: the cache, default `home()/environments`.

    Concurrent requests for the same environment build it once. Raises NotInstallable, BuildError, UvError, LockError.
    """
    root = (root or home() / "environments").absolute()
    check_request(request)
    try:
        root.mkdir(parents=True, exist_ok=True)
        resolved = resolve(request, root=root) if request.refresh else None
        key = request_key(request, resolved)
        return _cached(root, key, request) or _build_locked(root, key, request, resolved, say)
    except OSError as error:
        output = f"{error.filename or root}: {error.strerror or one_line(error)}"
        raise BuildError(f"{request.title}: {output}", root / "logs", output) from None


# Descriptors of the shared locks on the environments that this process uses; they are closed when it exits.
_held: dict[tuple[str, str], int] = {}
_holding = threading.Lock()


def _cached(root: Path, key: str, request: Request) -> Environment | None:
    """Return the finished environment of a key and keep a shared lock on it; None if there is none."""
    with _holding:
        held = _held.get((str(root), key))
        found = _read(root, key, request) if held is not None else None
        if found is not None:
            return found
        if held is not None:
            # The environment was damaged while we hold its lock, which would block our own rebuild.
            os.close(_held.pop((str(root), key)))
    if not (root / key).exists():
        return None
    lock = lock_file(root, key)
    fcntl.flock(lock, fcntl.LOCK_SH)
    found = _read(root, key, request)
    if found is None:
        os.close(lock)
        return None
    with _holding:
        if (str(root), key) in _held:
            os.close(lock)
        else:
            _held[str(root), key] = lock
    return found


def _read(root: Path, key: str, request: Request) -> Environment | None:
    place = root / key
    note = place / NOTE
    try:
        raw = json.loads(note.read_text(encoding="utf-8"))
        packages = {str(name): str(version) for name, version in raw["packages"].items()}
        os.utime(note)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    python = place / "bin" / "python"
    # The link dangles if the base interpreter has been uninstalled.
    if raw.get("schema") != SCHEMA or not python.exists():
        return None
    return Environment(request.title, python, key, packages, place / RESOLUTION)


def _build_locked(root: Path, key: str, request: Request, resolved: str | None, say: Say) -> Environment:
    while True:
        with _exclusive(root, key, request, say) as lock:
            if _read(root, key, request) is None:
                _build(root, key, request, resolved, say, lock)
        # A prune may run between the two locks; then the environment is built again.
        if found := _cached(root, key, request):
            return found


@contextmanager
def _exclusive(root: Path, key: str, request: Request, say: Say) -> Iterator[int]:
    """Hold the exclusive lock. uv inherits the descriptor: if its parent is killed, the lock is held until uv ends."""
    lock = lock_file(root, key)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"{request.title}: another process builds it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _build(root: Path, key: str, request: Request, resolved: str | None, say: Say, lock: int) -> None:
    """Build an environment atomically: on failure only its log remains. Raises NotInstallable or BuildError."""
    for stale in (root / key, *root.glob(f".{key}.*.partial")):
        shutil.rmtree(stale, ignore_errors=True)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{key}.log"
    log.unlink(missing_ok=True)
    say(f"{request.title}: building")
    partial = root / f".{key}.{os.getpid()}.partial"
    try:
        install = Installation(request, partial, log, (lock,), say)
        install.run(resolved)
        note = {
            "schema": SCHEMA,
            "name": request.title,
            "requirements": [without_url(r) for r in request.requirements],
            "packages": installed(partial),
        }
        write_atomic(partial / NOTE, json.dumps(note, indent=1) + "\n")
        partial.rename(root / key)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def resolve(request: Request, *, root: Path | None = None) -> str:
    """Resolve the requirements today; return the lock file with URLs. Raises NotInstallable, BuildError, UvError."""
    root = (root or home() / "environments").absolute()
    logs = root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"resolve-{request_key(request, None)}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".resolve-") as folder:
        out = Path(folder) / RESOLUTION
        installation = Installation(request, root, log)
        installation.resolve(out, installation.interpreter)
        return out.read_text(encoding="utf-8")


def installed(place: Path) -> dict[str, str]:
    """Return canonical name -> version of the installed packages, without starting the interpreter."""
    sites = [str(p) for p in place.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=sites)
    return dict(sorted((canonicalize_name(d.metadata["Name"]), d.version) for d in found))


def release(environment: Environment, root: Path | None = None) -> None:
    """Release an environment before the process ends; it may be deleted from then on."""
    with _holding:
        lock = _held.pop((str((root or home() / "environments").absolute()), environment.key), None)
    if lock is not None:
        os.close(lock)
