"""What a training leaves besides its checkpoint: checks before the first step, its log, the caches it publishes.

Standard library only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from launch import caches, environment
from launch.contract import Contract


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


def drop_steps(log: Path, step: int) -> None:
    """Drop the lines of a log from `step` on. It may have begun at a later step than the training."""
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(takewhile(lambda line: _step_of(line) < step, lines)))


def _step_of(line: str) -> float:
    """Return the step of a log's line, infinity for one that was cut off."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


def publish(contract: Contract) -> int:
    """Publish a named run's caches -> files copied. A failure is one line: the training is complete and saved."""
    try:
        return environment.publish_caches(contract)
    except (caches.CacheError, OSError) as error:
        print(f"caches not published: {getattr(error, 'strerror', error)}", file=sys.stderr)
        return 0
