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
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TextIO

from packaging.utils import canonicalize_name

from bumpgate.core.errors import one_line
from bumpgate.core.rows import write_atomic
from bumpgate.env.cached import NOTE, Say, lock_of
from bumpgate.env.installation import RESOLUTION, BuildError, Installation, NotInstallable
from bumpgate.env.request import SCHEMA, Request, check_request, request_key, without_url
from bumpgate.process.home import home
from bumpgate.process.locks import try_lock

__all__ = ["BuildError", "Environment", "NotInstallable", "Request", "build", "release", "resolve"]

# The shared locks on the environments that this process uses; they are released when it exits.
_held: dict[Path, TextIO] = {}
_holding = threading.Lock()


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
        place = root / request_key(request, resolved)
        # A prune may run between the build and its use; then the environment is built again.
        while (found := _use(place, request)) is None:
            _build_alone(place, request, resolved, say)
        return found
    except OSError as error:
        output = f"{error.filename or root}: {error.strerror or one_line(error)}"
        raise BuildError(f"{request.title}: {output}", root / "logs", output) from None


def release(environment: Environment) -> None:
    """Release an environment before the process ends; it may be deleted from then on."""
    with _holding:
        lock = _held.pop(environment.python.parent.parent, None)
    if lock is not None:
        lock.close()


def _use(place: Path, request: Request) -> Environment | None:
    """Return the finished environment of a folder and keep a shared lock on it; None if there is none."""
    with _holding:
        held = _held.get(place)
        found = _read(place, request) if held else None
        if held and found is None:
            # The environment was damaged while we hold its lock, which would block our own rebuild.
            _held.pop(place).close()
    if found is not None or not place.exists():
        return found
    lock = lock_of(place)
    fcntl.flock(lock, fcntl.LOCK_SH)
    found = _read(place, request)
    with _holding:
        if found is None or _held.setdefault(place, lock) is not lock:
            lock.close()
    return found


def _read(place: Path, request: Request) -> Environment | None:
    note, python = place / NOTE, place / "bin" / "python"
    try:
        raw = json.loads(note.read_text(encoding="utf-8"))
        packages = {str(name): str(version) for name, version in raw["packages"].items()}
        os.utime(note)
        # The link dangles if the base interpreter has been uninstalled.
        usable = raw["schema"] == SCHEMA and python.exists()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Environment(request.title, python, place.name, packages, place / RESOLUTION) if usable else None


def _build_alone(place: Path, request: Request, resolved: str | None, say: Say) -> None:
    """Build an environment while no other process builds or uses it, unless another has built it meanwhile.

    uv inherits the lock: if its parent is killed, the lock is held until uv ends.
    """
    with lock_of(place) as lock:
        if not try_lock(lock):
            say(f"{request.title}: another process builds it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _read(place, request) is None:
            _build(place, request, resolved, say, lock.fileno())


def _build(place: Path, request: Request, resolved: str | None, say: Say, lock: int) -> None:
    """Build an environment atomically: on failure only its log remains. Raises NotInstallable or BuildError."""
    root, key = place.parent, place.name
    for stale in (place, *root.glob(f".{key}.*.partial")):
        shutil.rmtree(stale, ignore_errors=True)
    log = _new_log(root, key)
    say(f"{request.title}: building")
    partial = root / f".{key}.{os.getpid()}.partial"
    try:
        Installation(request, partial, log, (lock,), say).run(resolved)
        note = {
            "schema": SCHEMA,
            "name": request.title,
            "requirements": [without_url(r) for r in request.requirements],
            "packages": installed(partial),
        }
        write_atomic(partial / NOTE, json.dumps(note, indent=1) + "\n")
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def resolve(request: Request, *, root: Path | None = None) -> str:
    """Resolve the requirements today; return the lock file with URLs. Raises NotInstallable, BuildError, UvError."""
    root = (root or home() / "environments").absolute()
    log = _new_log(root, f"resolve-{request_key(request, None)}")
    with tempfile.TemporaryDirectory(dir=root, prefix=".resolve-") as folder:
        out = Path(folder) / RESOLUTION
        installation = Installation(request, root, log)
        installation.resolve(out, installation.interpreter)
        return out.read_text(encoding="utf-8")


def _new_log(root: Path, name: str) -> Path:
    log = root / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    return log


def installed(place: Path) -> dict[str, str]:
    """Return canonical name -> version of the installed packages, without starting the interpreter."""
    sites = [str(p) for p in place.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=sites)
    return dict(sorted((canonicalize_name(d.metadata["Name"]), d.version) for d in found))
