"""Cache directories: usability checks, private replacements, seeding from another directory, disk-full errors.

Standard library only: a launcher calls this before it imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from launch.contract import ContractError

# Full file system, quota, file size limit: failures of the machine, not of the model.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Compilers and linkers run in subprocesses, so only the text of their errors is available.
FULL_TEXTS = tuple(os.strerror(code) for code in FULL)
PROBE = bytes(4096)
SEED = ".seed"  # contains the digest of the content copied here last
PART = ".part-"  # prefix of the temporary names of unfinished copies
PRIVATE = "BUMPGATE_PRIVATE_CACHE"


class CacheError(ContractError):
    """A cache directory cannot be used. The message is one line."""


class DiskFull(OSError):  # noqa: N818
    """A write failed on a full disk, quota or file limit; `strerror` is one line with the location."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(code, f"{place}: {os.strerror(code)}")


@contextmanager
def writing(place: str) -> Iterator[None]:
    """Convert an OSError inside the block to DiskFull or CacheError, one line that begins with `place`."""
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(error.errno, place) from error
        raise CacheError(f"{place}: cannot be written ({error.strerror})") from error


def disk_full(error: BaseException) -> str | None:
    """Return the line about a full disk in an error's chain (g++ only prints text), or None if there is none."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno in FULL:
            where = f"{link.filename}: " if link.filename else ""
            return f"{where}{link.strerror}"
        message = next((line for line in str(link).splitlines() if any(t in line for t in FULL_TEXTS)), None)
        if message:
            return message.strip()
        pending += [link.__context__, link.__cause__]
    return None


def usable(directory: Path, minimum_free: int = 0, name: str = "") -> None:
    """Check a directory by writing 4 KiB and reading the free space, in bytes; `name` begins each message.

    Root ignores mode bits. Raises CacheError if the directory is missing, not writable or has less than minimum_free,
    DiskFull if the write finds no space.
    """
    place = f"{name}={directory}" if name else str(directory)
    if not directory.is_dir():
        raise CacheError(f"{place}: no such directory")
    with writing(place), tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(PROBE)
        probe.flush()
        os.fsync(probe.fileno())  # with delayed allocation, ENOSPC is raised only here
    with writing(place):
        free = shutil.disk_usage(directory).free
    if free < minimum_free:
        raise CacheError(f"{place}: {free >> 20} MiB free, the contract requires {minimum_free >> 20}")


def make_private(names: Iterable[str]) -> dict[str, str]:
    """Map each variable to a directory private to this process, and PRIVATE to their parent directory."""
    with writing(tempfile.gettempdir()):
        root = Path(tempfile.mkdtemp(prefix=f"bumpgate-cache-{os.getpid()}-"))
        given = {name: root / name.lower() for name in names}
        for directory in given.values():
            directory.mkdir()
    return {PRIVATE: str(root), **{name: str(directory) for name, directory in given.items()}}


def own_private(root: str | None) -> Path | None:
    """Return `root` if this process created it (also before an exec); a child that inherits it must not delete it."""
    path = Path(root) if root else None
    return path if path and path.name.startswith(f"bumpgate-cache-{os.getpid()}-") else None


def sha256(path: Path) -> str:
    """SHA-256 hex digest of a file."""
    with path.open("rb") as file:
        return _digest(file)


def _digest(file: BinaryIO, copy: BinaryIO | None = None) -> str:
    digest = hashlib.sha256()
    for block in iter(partial(file.read, 1 << 20), b""):
        digest.update(block)
        if copy is not None:
            copy.write(block)
    return digest.hexdigest()


def files(directory: Path) -> dict[str, Path]:
    """Map relative name -> path of every file below, without the marker files of `sync`."""
    # Unlike rglob, os.walk tolerates a directory that a running compiler removes.
    below = (Path(place, name) for place, _, names in os.walk(directory) for name in names)
    found = (path for path in sorted(below) if path.is_file())
    return {
        path.relative_to(directory).as_posix(): path
        for path in found
        if path.name != SEED and not path.name.startswith(PART)
    }


def sync(source: Path, target: Path) -> list[str]:
    """Copy files that are missing or have another hash in `target`, delete nothing -> the names copied.

    A target last seeded from the same content is warm: only its missing files are restored. Each file is written
    atomically, so that running jobs may share both directories; a file that vanishes is left out. Raises CacheError on
    an unusable target or a file that is written during the copy, DiskFull.
    """
    if not source.is_dir():
        raise CacheError(f"{source}: no such directory")
    usable(target)
    given = {}
    for name, path in files(source).items():
        with suppress(FileNotFoundError):
            given[name] = sha256(path)
    seed = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()
    mark, copied = target / SEED, []
    warm = mark.is_file() and mark.read_text() == seed
    for name, digest in given.items():
        path = target / name
        if path.is_file() and (warm or sha256(path) == digest):
            continue
        if not (source / name).is_file():
            continue
        with writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            _put(source / name, path, digest)
        copied.append(name)
    if not warm:
        with writing(str(mark)), _replacing(mark) as part:
            part.write_text(seed)
    return copied


def _put(source: Path, path: Path, digest: str) -> None:
    """Copy one file with its mtime to a temporary name, then rename it."""
    with _replacing(path) as part:
        with source.open("rb") as file, part.open("wb") as copy:
            arrived = _digest(file, copy)
        if arrived not in (digest, sha256(source)):  # nor the digest of a file that replaced it
            raise CacheError(f"{source}: changed while it was copied")
        shutil.copystat(source, part)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path in the same directory; rename it to `path` if the block succeeds."""
    handle, name = tempfile.mkstemp(prefix=PART, dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
