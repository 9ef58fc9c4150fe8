"""What a training leaves: checks before the first step, its checkpoint's file, its log.

Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launch import caches
from launch.contract import ContractError


@dataclass(frozen=True)
class Files:
    """checkpoint: the file of the run's state. log: a file of one JSON line a step. None: not written."""

    checkpoint: Path | None = None
    log: Path | None = None


NO_FILES = Files()


def check(files: Mapping[str, Path | None]) -> None:
    """Check that each file, by its option, can be written: a checkpoint is first written after the steps before it.

    Raises CacheError if its directory is missing or not writable or it is a directory itself, DiskFull.
    """
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise caches.CacheError(f"{option}={path}: is a directory")
        caches.usable(path.parent, name=f"directory of {option}")


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `write` writes, completely or not at all, also if the machine stops meanwhile."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def drop_steps(log: Path, step: int) -> None:
    """Drop the lines of a log from `step` on. It may have begun at a later step than the training.

    Raises ContractError, and changes nothing, if a line is not a step; the last one may have been cut off.
    """
    lines = log.read_text().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            if number < len(lines) or line.endswith("\n"):
                raise ContractError(
                    f"{log}: line {number} is not a step of a training; use another --log"
                ) from None
    log.write_text("".join(kept))
