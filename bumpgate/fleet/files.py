"""Folders that a task leaves on its host, returned as files by name: hosts share no file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bumpgate.process.home import home

# A longer log keeps its end, where it has its reason. A part of a JSON document is none.
LONGEST = 32 << 20
LEFT_OUT = ("caches",)


@contextmanager
def folder_on_host(*parts: str) -> Iterator[Path]:
    """Yield a folder of this host's own, the same one for the same parts: a task that is repeated here continues in it.

    It is deleted once the block has ended without an exception.
    """
    place = home().joinpath("fleet", *parts)
    place.mkdir(parents=True, exist_ok=True)
    yield place
    shutil.rmtree(place, ignore_errors=True)


def pack(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without caches."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not set(name.parts) & set(LEFT_OUT):
            with path.open("rb") as file:
                if path.suffix != ".json":
                    file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST))
                found[name.as_posix()] = file.read()
    return found


def unpack(files: Mapping[str, bytes], folder: Path, last: str) -> None:
    """Write files into a folder, the one that makes the others count at the end: a kill in between leaves it out."""
    for name in sorted(files, key=lambda each: each == last):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(files[name])
        partial.replace(path)
