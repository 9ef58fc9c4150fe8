"""Environments: an interpreter with one package set, built by uv, cached by content, created atomically.

`build` resolves and installs next to the cache and renames the result into it. A process that uses an environment
holds a shared lock on it until it exits, so that `bumpgate environments --prune` never removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from bumpgate.environments import compiled, interpreter, store
from bumpgate.environments.interpreter import ChildFault
from bumpgate.environments.locks import read_lock
from bumpgate.environments.request import (
    RUNNING,
    SCHEMA,
    Request,
    check_request,
    lane_request,
    request_key,
    without_url,
)
from bumpgate.environments.store import home
from bumpgate.environments.uv import run_uv
from bumpgate.rows import BumpgateError, one_line, write_atomic

__all__ = [
    "BuildError",
    "Environment",
    "NotInstallable",
    "Request",
    "build",
    "command",
    "lane_request",
    "release",
    "resolve",
]

NOTE = "bumpgate.json"
RESOLUTION = "pylock.toml"
PYLOCK = ("--preview-features", "pylock")
TAIL_LINES = 12
SCRIPT_SECONDS = 300
# Messages of uv's resolver and installer if the set cannot exist; anything else is the machine or the index.
CANNOT_EXIST = (
    "No solution found when resolving dependencies",
    "no wheel for the current platform",
    "doesn't have a wheel for the current platform",
    "404 Not Found",
    "410 Gone",
)
# Messages that make uv's "no solution" a network failure.
NOT_REACHED = ("network was disabled", "401 Unauthorized", "403 Forbidden")
Say = Callable[[str], None]


class BuildError(BumpgateError):
    """Infrastructure failure of a build (machine, network or index); no verdict on the set. log: all output of uv."""

    def __init__(self, message: str, log: Path, tail: str) -> None:
        super().__init__(message)
        self.log = log
        self.tail = tail


class NotInstallable(BuildError):  # noqa: N818 - an answer about the set, not a fault: bisection skips it
    """The index lacks the version, or a wheel of it for this interpreter, or the requirements conflict."""


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


def _lock_file(root: Path, key: str) -> int:
    folder = root / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


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
    lock = _lock_file(root, key)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
    """Hold the exclusive lock. uv inherits the descriptor: if its parent is killed, uv keeps the lock until it ends."""
    lock = _lock_file(root, key)
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
        install = _Installation(request, partial, log, (lock,))
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


@dataclass(frozen=True)
class _Installation:
    """The uv calls of one build."""

    request: Request
    place: Path
    log: Path
    locks: tuple[int, ...] = ()

    def run(self, resolved: str | None) -> None:
        self.uv("venv", "--quiet", "--relocatable", "--python", self.interpreter, self.place)
        resolution = self.place / RESOLUTION
        if self.request.lock is not None:
            self.install_locked(self.request.lock)
            shutil.copyfile(self.request.lock, resolution)
        else:
            if resolved is None:
                self.resolve(resolution, self.python)
            else:
                resolution.write_text(resolved, encoding="utf-8")
            self.uv("pip", "sync", "--quiet", *PYLOCK, "--python", self.python, *self.sources, resolution)
        if self.request.script is not None:
            self.run_script(self.request.script)

    def run_script(self, script: Path) -> None:
        """Run the request's script in the environment; its output goes into the log."""
        try:
            output = interpreter.run(
                [str(self.python), "-I", str(script)], self.place, os.environ, SCRIPT_SECONDS
            )
        except ChildFault as fault:
            raise BuildError(f"{self.request.title}: {script.name}: {fault}", self.log, str(fault)) from None
        with self.log.open("a", encoding="utf-8") as f:
            f.write(f"$ {script.name}\n{output}")

    @property
    def python(self) -> Path:
        return self.place / "bin" / "python"

    @property
    def interpreter(self) -> str:
        return sys.executable if self.request.python == RUNNING else self.request.python

    @property
    def sources(self) -> list[str]:
        request = self.request
        flags = ["--no-build"] if request.only_wheels else []
        if request.offline:
            flags += ["--offline", "--no-index"]
        if request.index and not request.offline:
            flags += ["--index", request.index]
        return flags + [part for place in request.find_links for part in ("--find-links", place)]

    def resolve(self, out: Path, python: str | Path) -> None:
        """Resolve requirements to a lock file for this interpreter and platform, at `out`."""
        if self.request.prefer is not None:
            # uv keeps the versions in an existing output file where possible.
            shutil.copyfile(self.request.prefer, out)
        flags: list[str | Path] = [] if self.request.dependencies else ["--no-deps"]
        if self.request.overrides is not None:
            flags += ["--override", self.request.overrides]
        if self.request.forced:
            forced = out.with_suffix(".overrides.txt")
            forced.write_text("".join(f"{text}\n" for text in self.request.forced), encoding="utf-8")
            flags += ["--override", forced]
        self.uv(
            *("pip", "compile", "-", "--quiet", *PYLOCK, "--format", "pylock.toml", "--no-header"),
            *("--output-file", out, "--python", python, *flags, *self.sources),
            stdin="\n".join(self.request.requirements) + "\n",
        )

    def install_locked(self, path: Path) -> None:
        """Take files from the store first, then from the host's index; hashes are checked for both."""
        lock = read_lock(path)
        folders = [found.parent for p in lock.packages for w in p.wheels if (found := store.find(w))]
        links = [part for folder in folders for part in ("--find-links", str(folder))]
        pins = self.log.with_suffix(".txt")
        pins.write_text("".join(f"{p.requirement}\n" for p in lock.packages), encoding="utf-8")
        self.uv(
            *("pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", self.python),
            *self.sources,
            *links,
            *("-r", pins),
        )

    def uv(self, *arguments: str | Path, stdin: str = "") -> None:
        code, output = run_uv(arguments, self.log, stdin=stdin, keep_open=self.locks)
        if code:
            raise self.failure(code, output)

    def failure(self, code: int, output: str) -> BuildError:
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        lines = [
            line.strip() for line in output.splitlines() if line.strip().startswith(("error:", "cause:"))
        ]
        ended = f"uv was killed by {signal.Signals(-code).name}" if code < 0 else f"uv ended with {code}"
        what = one_line(" ".join(lines) or tail or ended, 400)
        absent = any(words in output for words in CANNOT_EXIST) and not any(w in output for w in NOT_REACHED)
        kind = NotInstallable if absent else BuildError
        return kind(f"{self.request.title}: {what} (log: {self.log})", self.log, tail)


def resolve(request: Request, *, root: Path | None = None) -> str:
    """Resolve the requirements today; return the lock file with URLs. Raises NotInstallable, BuildError, UvError."""
    root = (root or home() / "environments").absolute()
    logs = root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"resolve-{request_key(request, None)}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".resolve-") as folder:
        out = Path(folder) / RESOLUTION
        installation = _Installation(request, root, log)
        installation.resolve(out, installation.interpreter)
        return out.read_text(encoding="utf-8")


def installed(place: Path) -> dict[str, str]:
    """Return canonical name -> version of the installed packages, without starting the interpreter."""
    sites = [str(p) for p in place.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=sites)
    return dict(sorted((canonicalize_name(d.metadata["Name"]), d.version) for d in found))


@dataclass(frozen=True)
class Kept:
    """A cached environment. size: bytes of its files, including those that uv links from its own cache."""

    key: str
    name: str
    used: float
    size: int
    in_use: bool


def kept(root: Path | None = None) -> list[Kept]:
    """List the cached environments, least recently used first."""
    root = root or home() / "environments"
    found = []
    for note in root.glob(f"[!.]*/{NOTE}"):
        place = note.parent
        size = sum(os.lstat(f).st_size for f in place.rglob("*") if not f.is_dir())
        name = json.loads(note.read_text(encoding="utf-8")).get("name", "?")
        with _unused(root, place.name) as free:
            found.append(Kept(place.name, name, note.stat().st_mtime, size, not free))
    return sorted(found, key=lambda k: k.used)


def discard(key: str, root: Path | None = None) -> bool:
    """Delete a cached environment; return False if another process, or this one, uses it."""
    root = root or home() / "environments"
    with _unused(root, key) as free:
        if free and (root / key).exists():
            # Rename first: a partially deleted environment must not look complete.
            gone = root / f".{key}.{os.getpid()}.partial"
            (root / key).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    return free


def release(environment: Environment, root: Path | None = None) -> None:
    """Release an environment before the process ends; it may be deleted from then on."""
    with _holding:
        lock = _held.pop((str((root or home() / "environments").absolute()), environment.key), None)
    if lock is not None:
        os.close(lock)


@contextmanager
def _unused(root: Path, key: str) -> Iterator[bool]:
    """Yield whether no process uses the environment; if so, none can acquire it until exit."""
    lock = _lock_file(root, key)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def command(
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete all but the newest, and none in use.")
    ] = False,
    keep: Annotated[int, typer.Option(help="How many --prune leaves, most recently used first.", min=0)] = 4,
) -> None:
    """List the cached environments, least recently used first, or delete old ones and their compile caches.

    Exit codes: 0 done, 4 bad input.
    """
    from datetime import datetime

    found = kept()
    for entry in found:
        day = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        used = "  in use" if entry.in_use else ""
        typer.echo(f"{entry.key}  {day}  {entry.size / 2**20:8.1f} MiB  {entry.name}{used}")
    if not found:
        typer.echo("no cached environments")
    if prune:
        for entry in found[: max(0, len(found) - keep)]:
            typer.echo(f"{'deleted' if discard(entry.key) else 'kept, in use:'} {entry.key}")
        for name in compiled.prune({entry.key for entry in kept()}):
            typer.echo(f"deleted the compile caches {name}")
