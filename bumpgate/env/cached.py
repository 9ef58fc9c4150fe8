"""Cached environments: which there are, what they take on disk, and which are deleted to make room for the next.

uv links an environment's files from its cache, so deleting an environment alone frees almost nothing: what uv unpacked
for it, and no other environment links, is deleted from uv's cache too. uv downloads it again if it is needed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from bumpgate.core.errors import BumpgateError
from bumpgate.env import compiled
from bumpgate.env.uv import uv_cache
from bumpgate.process.home import home
from bumpgate.process.locks import try_lock

NOTE = "bumpgate.json"
# The budget of all environments in bytes, such as 40G; set by --disk, and inherited by the processes of a command.
VARIABLE = "BUMPGATE_DISK"
# Without a budget: this share of the space that environments take now or could take.
SHARE = 0.5
UNITS = {"M": 20, "G": 30, "T": 40}
# Held shared while uv installs, and exclusively while unpacked files are deleted from its cache.
UNPACKING = "unpacking"
Say = Callable[[str], None]
Inode = tuple[int, int]


class NoRoomError(BumpgateError):
    """The next environment does not fit on the disk or into the budget, and nothing is left to delete."""


def lock_of(place: Path) -> TextIO:
    """Open the lock file of an environment, or of UNPACKING in their folder."""
    folder = place.parent / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / place.name).open("a")


@contextmanager
def unpacking(root: Path, *, exclusive: bool = False) -> Iterator[int]:
    """Hold the lock UNPACKING; yield its descriptor."""
    with lock_of(root / UNPACKING) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield lock.fileno()


@dataclass(frozen=True)
class Kept:
    """A cached environment. size: bytes of its files, including those that it shares with others."""

    key: str
    name: str
    used: float
    size: int
    in_use: bool


def kept(root: Path | None = None) -> list[Kept]:
    """List the cached environments, least recently used first."""
    found = []
    for note in _notes(root or home() / "environments"):
        place = note.parent
        with lock_of(place) as lock:
            size = sum(_files(place).values())
            name = str(_read(note).get("name", "?"))
            found.append(Kept(place.name, name, note.stat().st_mtime, size, not try_lock(lock)))
    return sorted(found, key=lambda k: k.used)


def installed_versions(root: Path) -> set[tuple[str, str]]:
    """Return (package, version) of everything that some cached environment holds."""
    return {pair for note in map(_read, _notes(root)) for pair in note.get("packages", {}).items()}


def _notes(root: Path) -> list[Path]:
    return list(root.glob(f"[!.]*/{NOTE}"))


def _read(note: Path) -> dict[str, Any]:
    """Return the note of an environment; empty if it is damaged."""
    try:
        raw = dict(json.loads(note.read_text(encoding="utf-8")))
        return raw | {"packages": dict(raw.get("packages", {}))}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def usage(root: Path | None = None) -> int:
    """Return the bytes on disk of all cached environments; a file that several of them share counts once."""
    return sum(_files(root or home() / "environments").values())


def discard(key: str, root: Path | None = None) -> bool:
    """Delete a cached environment, and what uv's cache holds for it alone.

    Return False if another process, or this one, uses it.
    """
    root = root or home() / "environments"
    with lock_of(root / key) as lock:
        if not try_lock(lock):
            return False
        if (root / key).exists():
            files = set(_files(root / key))
            # Rename first: a partially deleted environment must not look complete.
            gone = root / f".{key}.{os.getpid()}.partial"
            (root / key).rename(gone)
            with unpacking(root, exclusive=True):
                shutil.rmtree(gone, ignore_errors=True)
                _discard_unpacked(files)
    return True


def make_room(root: Path, needed: int, say: Say = lambda line: None) -> None:
    """Delete the least recently used environments until the next one fits. needed: its bytes, as far as known.

    Raises NoRoomError, one line, if it does not fit although nothing is left to delete.
    """
    limit = budget(root)
    candidates = [entry for entry in kept(root) if not entry.in_use]
    while (excess := _excess(root, needed, limit)) > 0 and candidates:
        entry = candidates.pop(0)
        if discard(entry.key, root):
            what = f"the environment {entry.name} (last used {_day(entry.used)})"
            say(f"deleted {what}: {_gib(excess)} had to be freed")
            compiled.prune({note.parent.name for note in _notes(root)})
    free = shutil.disk_usage(root).free
    if free < needed:
        raise NoRoomError(
            f"the disk of {root} is full: {_gib(free)} free, {_gib(needed)} needed, and all environments there are in"
            f" use; free space, or name a folder on another disk: export BUMPGATE_HOME=DIR"
        )
    if os.environ.get(VARIABLE) and excess > 0:
        raise NoRoomError(
            f"--disk {os.environ[VARIABLE]}: {_gib(usage(root))} of environments are in use and {_gib(needed)} more are"
            f" needed; allow {_gib(limit + excess)}"
        )


def budget(root: Path) -> int:
    """Return the bytes that environments may take: VARIABLE, else SHARE of what they take and of what is free.

    Raises BumpgateError on an invalid value.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return int(SHARE * (usage(root) + shutil.disk_usage(root).free))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or len(found[1]) > 9:
        raise BumpgateError(f"--disk {text}: not a size (expected e.g. 40G)")
    return int(float(found[1]) * 2 ** UNITS[found[2].upper()])


def _set_budget(text: str | None) -> str | None:
    if text:
        os.environ[VARIABLE] = text
        budget(Path("/"))
    return text


Disk = Annotated[
    str | None,
    typer.Option(
        "--disk",
        callback=_set_budget,
        help="What cached environments may take, such as 40G; by default half of what they take and is free.",
    ),
]


def _excess(root: Path, needed: int, limit: int) -> int:
    """Return how many bytes are missing, within the budget or on the disk."""
    return max(usage(root) + needed - limit, needed - shutil.disk_usage(root).free)


def _files(place: Path) -> dict[Inode, int]:
    """Return the bytes on disk of every file below a folder."""
    found = {}
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                stat = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return found


def _discard_unpacked(files: set[Inode]) -> None:
    """Delete the wheels unpacked in uv's cache that consist of these files and that nothing links any more.

    uv detects this only for wheels that it downloaded: the .rev file of a local one, which names the folder of the
    unpacked one, would fail each later installation, so it is deleted first.
    """
    cache = uv_cache()
    local = {path: path.read_bytes() for path in cache.glob("wheels-v*/**/*.rev")}
    for archive in cache.glob("archive-v*/*"):
        stats = [os.lstat(os.path.join(folder, n)) for folder, _, names in os.walk(archive) for n in names]
        if any((s.st_dev, s.st_ino) in files for s in stats) and all(s.st_nlink == 1 for s in stats):
            for path in local:
                if archive.name.encode() in local[path]:
                    path.unlink(missing_ok=True)
            shutil.rmtree(archive, ignore_errors=True)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def command(
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete all but the newest, and none in use.")
    ] = False,
    keep: Annotated[int, typer.Option(help="How many --prune leaves, most recently used first.", min=0)] = 4,
    disk: Disk = None,
) -> None:
    """List the cached environments, least recently used first, or delete old ones and their compile caches.

    --disk deletes the least recently used until the others fit. Files that environments share count once in the total.

    Exit codes: 0 done, 4 bad input, or environments in use that are larger than --disk.
    """
    root = home() / "environments"
    found = kept()
    for entry in found:
        used = "  in use" if entry.in_use else ""
        typer.echo(f"{entry.key}  {_day(entry.used)}  {entry.size / 2**20:8.1f} MiB  {entry.name}{used}")
    typer.echo(f"{_gib(usage())} together" if found else "no cached environments")
    if prune:
        for entry in found[: max(0, len(found) - keep)]:
            typer.echo(f"{'deleted' if discard(entry.key) else 'kept, in use:'} {entry.key}")
        for name in compiled.prune({entry.key for entry in kept()}):
            typer.echo(f"deleted the compile caches {name}")
    if disk and found:
        make_room(root, 0, typer.echo)
