"""One installation by uv: resolves a request or takes a lock, makes room on the disk, and installs by hashes.

Files are installed by `uv pip install` with their hashes, which finds what uv has unpacked before. `uv pip sync` of a
pylock.toml downloads again from an index whose answers are not cacheable.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.env import cached, store
from bumpgate.env.cached import Say
from bumpgate.env.locks import pins, read_lock, wheel_sizes
from bumpgate.env.request import RUNNING, Request
from bumpgate.env.uv import host_settings, run_uv
from bumpgate.process import child
from bumpgate.process.child import ChildFault

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
# A full disk, a quota, a limit on file sizes.
FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large|SIGXFSZ")
# Bytes of an installed CUDA build of torch per byte of its wheels: 5356 MiB of 2881.
UNPACKED = 1.9


class BuildError(BumpgateError):
    """Infrastructure failure of a build (machine, network or index); no verdict on the set. log: all output of uv."""

    exit_code = 125

    def __init__(self, message: str, log: Path, tail: str) -> None:
        super().__init__(message)
        self.log = log
        self.tail = tail


class NotInstallable(BuildError):  # noqa: N818 - an answer about the set, not a fault: bisection skips it
    """The index lacks the version, or a wheel of it for this interpreter, or the requirements conflict."""

    exit_code = 4


@dataclass(frozen=True)
class Installation:
    """The uv calls of one build."""

    request: Request
    place: Path
    log: Path
    locks: tuple[int, ...] = ()
    say: Say = lambda line: None

    def run(self, resolved: str | None) -> None:
        """Create the environment. resolved: a lock made today; else a lock of the request's last build is used."""
        self.uv("venv", "--quiet", "--relocatable", "--python", self.interpreter, self.place)
        resolution = self.place / RESOLUTION
        saved = self.log.with_suffix(".toml")
        if self.request.lock is not None:
            shutil.copyfile(self.request.lock, resolution)
            self.install(resolution)
        elif resolved is not None:
            resolution.write_text(resolved, encoding="utf-8")
            self.install(resolution)
        elif not self.install_again(saved, resolution):
            self.resolve(resolution, self.python)
            self.install(resolution)
            shutil.copyfile(resolution, saved)
        if self.request.script is not None:
            self.run_script(self.request.script)

    def install_again(self, saved: Path, resolution: Path) -> bool:
        """Install what the same request was resolved to before; return False if there is none, or it failed."""
        if not saved.exists():
            return False
        shutil.copyfile(saved, resolution)
        with suppress(BuildError):
            self.install(resolution)
            return True
        # The index no longer has a file of it, or has failed: then resolving reports why.
        resolution.unlink()
        return False

    def install(self, resolution: Path) -> None:
        """Install a lock by its hashes: from the wheel store first, then from uv's cache, then from the index."""
        root = self.place.parent
        present = cached.installed_versions(root)
        new = [size for package, size in wheel_sizes(resolution).items() if package not in present]
        try:
            cached.make_room(root, int(UNPACKED * sum(new)), self.say)
        except cached.NoRoomError as error:
            raise BuildError(f"{self.request.title}: {error}", self.log, str(error)) from None
        lines = pins(resolution)
        with cached.unpacking(root) as held:
            if lines is None:
                # Files without hashes, or sources: only sync installs these as they were resolved.
                flags = (*PYLOCK, "--python", str(self.python), *self.sources)
                self.uv("pip", "sync", "--quiet", *flags, resolution, keep_open=held)
                return
            requirements = _lines(self.log.with_suffix(".txt"), lines)
            stored = store.find_links(read_lock(self.request.lock).packages if self.request.lock else ())
            flags = ("--no-deps", "--require-hashes", "--python", str(self.python), *self.sources, *stored)
            self.uv("pip", "install", "--quiet", *flags, "-r", requirements, keep_open=held)

    def run_script(self, script: Path) -> None:
        """Run the request's script in the environment; its output goes into the log."""
        try:
            output = child.run([str(self.python), "-I", str(script)], self.place, os.environ, SCRIPT_SECONDS)
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
        index = ["--index", request.index] if request.index else []
        flags += ["--offline", "--no-index"] if request.offline else index
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
            flags += ["--override", _lines(out.with_suffix(".overrides.txt"), self.request.forced)]
        requirements = _lines(out.with_suffix(".in"), self.request.requirements)
        self.uv(
            *("pip", "compile", requirements, "--quiet", *PYLOCK, "--format", "pylock.toml", "--no-header"),
            *("--output-file", out, "--python", python, *flags, *self.sources),
        )

    def uv(self, command: str, *arguments: str | Path, keep_open: int | None = None) -> None:
        held = self.locks if keep_open is None else (*self.locks, keep_open)
        # For uv, one --find-links replaces all of the host's.
        places = host_settings().get("UV_FIND_LINKS", "").split(",") if "--find-links" in arguments else []
        host = [part for place in places if place for part in ("--find-links", place)]
        code, output = run_uv((command, *arguments, *host), self.log, held)
        if code:
            raise self.failure(code, output)

    def failure(self, code: int, output: str) -> BuildError:
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        every = [line.strip() for line in output.splitlines()]
        lines = [line for line in every if line.startswith(("error:", "cause:"))]
        ended = f"uv was killed by {signal.Signals(-code).name}" if code < 0 else f"uv ended with {code}"
        if full := next((line for line in (*every, ended) if FULL.search(line)), ""):
            free = shutil.disk_usage(self.place.parent).free / 2**30
            why = f"the disk is full ({free:.1f} GiB free): {one_line(full, 200)}; delete environments with:"
            return BuildError(f"{self.request.title}: {why} bumpgate environments --prune", self.log, tail)
        what = one_line(" ".join(lines) or tail or ended, 400)
        absent = any(words in output for words in CANNOT_EXIST) and not any(w in output for w in NOT_REACHED)
        kind = NotInstallable if absent else BuildError
        return kind(f"{self.request.title}: {what} (log: {self.log})", self.log, tail)


def _lines(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
