"""Our own wheel store: files by content, `<store>/<sha256>/<file name>`, and SHA256SUMS over all of them.

An index drops old builds (nightlies after about 60 days), and a mirror may hold other bytes under the same name; an
adopted set must remain available for a rollback.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import write_atomic
from bumpgate.env.locks import SHA256, Locked, Wheel
from bumpgate.process.home import home
from bumpgate.process.locks import locked

SUMS = "SHA256SUMS"


class StoreError(BumpgateError):
    """A file of the store is missing, or does not match the hash in its path."""


def store_root() -> Path:
    """Return the wheel store: $BUMPGATE_STORE, else store/ in `home()`."""
    chosen = os.environ.get("BUMPGATE_STORE")
    return Path(chosen).expanduser() if chosen else home() / "store"


def find(wheel: Wheel) -> Path | None:
    """Return the path of a wheel in the store, or None. Its bytes are not read."""
    path = store_root() / wheel.path
    return path if path.is_file() else None


def find_links(packages: Iterable[Locked]) -> list[str]:
    """Return the options of an installer that name the folders of the store with files of these packages."""
    folders = [path.parent for p in packages for wheel in p.wheels if (path := find(wheel))]
    return [part for folder in folders for part in ("--find-links", str(folder))]


def sha256_of(path: Path) -> str:
    """Return the hexadecimal digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def contents() -> list[tuple[str, Path]]:
    """Return digest and path of each wheel, from its path: the bytes are not read."""
    paths = store_root().glob("*/*.whl")
    return sorted((path.parent.name, path) for path in paths if SHA256.fullmatch(path.parent.name))


def verify(wheel: Wheel) -> Path:
    """Return the path of a wheel after checking its hash. Raises StoreError, which names the file."""
    path = find(wheel)
    if path is None:
        raise StoreError(f"{wheel.file}: not in the wheel store")
    found = sha256_of(path)
    if found != wheel.sha256:
        raise StoreError(
            f"{wheel.file}: corrupt in the wheel store (sha256 {found[:12]}..., adopted {wheel.sha256[:12]}...);"
            f" delete {path}"
        )
    return path


def keep(path: Path) -> Path:
    """Store a wheel file by its own hash, and return its path in the store, where a lock can find it."""
    return put(Wheel(path.name, sha256_of(path)), [path.read_bytes()])


def put(wheel: Wheel, blocks: Iterable[bytes]) -> Path:
    """Store a wheel; its bytes must have the wheel's hash. An intact wheel in the store is kept.

    Raises StoreError on a hash mismatch, OSError on a full disk; no partial file remains.
    """
    root = store_root()
    path = root / wheel.path
    if path.is_file() and sha256_of(path) == wheel.sha256:
        return path
    if not save(path, wheel.sha256, blocks):
        raise StoreError(
            f"{wheel.file}: the source does not match the sha256 of the lock: run bumpgate freeze again"
        )
    with locked(root / ".writer", exclusive=True):  # writers wait for each other
        lines = [f"{sha256}  {sha256}/{path.name}\n" for sha256, path in contents()]
        write_atomic(root / SUMS, "".join(lines))  # for `sha256sum --check`
    return path


def save(path: Path, sha256: str, blocks: Iterable[bytes]) -> bool:
    """Write a file atomically; write nothing and return False if its bytes have another hash. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as f:
            for block in blocks:
                digest.update(block)
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        if digest.hexdigest() != sha256:
            return False
        os.replace(partial, path)
        return True
    finally:
        partial.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
