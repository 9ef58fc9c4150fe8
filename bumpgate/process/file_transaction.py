"""Replaces several files of a work tree together: all of them or none, even if the process is killed.

A journal holds the old contents, and what replaces them, while the files are replaced. A journal that remains is from
a killed process: `recover` restores the old contents.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.rows import write_atomic

JOURNAL = Path("baselines/.adoption.json")
ADOPTION, ROLLBACK = "adoption", "rollback"


class AdoptionError(BumpgateError):
    """A set that cannot be adopted, or an adoption that cannot be undone. One line."""


@dataclass(frozen=True)
class Edit:
    """One file. path: relative to the root, with slashes. before, after: its text; None if it does not exist."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Operation:
    """What replaces the files: an adoption of a lane, or the rollback of one. kind: ADOPTION or ROLLBACK."""

    kind: str
    lane: str

    def __str__(self) -> str:
        return f"the {self.kind} of lane {self.lane}"


@dataclass(frozen=True)
class Recovered:
    """What `recover` has undone. paths: of the restored files; empty if none had been changed yet."""

    operation: Operation
    paths: tuple[str, ...]


def digest(text: str | None) -> str:
    """Return the sha256 of a text; "" if there is no file."""
    return "" if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()


def read(path: Path) -> str | None:
    """Return the text of a file with its line ends; None if it does not exist."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None


def diff(edits: Iterable[Edit]) -> str:
    """Return the edits in the format of `git diff`."""
    out: list[str] = []
    for edit in edits:
        old = "/dev/null" if edit.before is None else f"a/{edit.path}"
        new = "/dev/null" if edit.after is None else f"b/{edit.path}"
        before, after = ((text or "").splitlines(keepends=True) for text in (edit.before, edit.after))
        out += difflib.unified_diff(before, after, old, new)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in out)


def replace_all(root: Path, edits: Sequence[Edit], operation: Operation) -> None:
    """Write every edit. Raises OSError after restoring every file. An existing journal must be recovered first."""
    files = {e.path: {"before": e.before, "after": digest(e.after)} for e in edits}
    for edit in edits:
        target = root / edit.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied", str(target))
    write_atomic(root / JOURNAL, json.dumps({**vars(operation), "files": files}) + "\n")
    try:
        for edit in edits:
            if edit.after is not None:
                _stage(root / edit.path, edit.after)
        for edit in edits:
            target = root / edit.path
            if edit.after is None:
                target.unlink()
            else:
                os.replace(_partial(target), target.resolve())
    except BaseException:
        recover(root)
        raise
    (root / JOURNAL).unlink()


def interrupted(root: Path) -> Operation | None:
    """Return the operation that was cut short in this tree, if any. Raises AdoptionError on a corrupt journal."""
    found = _journal(root)
    return found[0] if found else None


def recover(root: Path) -> Recovered | None:
    """Undo the changes of a killed process. Return None if there was none.

    Raises AdoptionError, without changing anything, if a file was edited since.
    """
    found = _journal(root)
    if found is None:
        return None
    operation, entries = found
    moved = []
    for path, (before, after) in entries.items():
        now = read(root / path)
        if now == before:
            continue
        if digest(now) != after:
            raise AdoptionError(
                f"{path} was edited after {operation} was cut short: restore it with git, then delete {JOURNAL}"
            )
        moved.append(path)
    for path in moved:
        before = entries[path][0]
        if before is None:
            (root / path).unlink()
        else:
            write_atomic(root / path, before)
    for path in entries:
        _partial(root / path).unlink(missing_ok=True)
    (root / JOURNAL).unlink()
    return Recovered(operation, tuple(moved))


def _journal(root: Path) -> tuple[Operation, dict[str, tuple[str | None, str]]] | None:
    """Return the operation of the journal, and path -> (old content, digest of the new one). None without a journal."""
    try:
        text = read(root / JOURNAL)
        if text is None:
            return None
        raw = json.loads(text)
        files = {str(path): (e["before"], str(e["after"])) for path, e in raw["files"].items()}
        return Operation(str(raw["kind"]), str(raw["lane"])), files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 80)
        raise AdoptionError(
            f"{JOURNAL}: not a journal ({why}): restore the tree with git, then delete it"
        ) from None


def _partial(target: Path) -> Path:
    """Return the new text's place, next to the file that a link names."""
    target = target.resolve()
    return target.with_name(f".{target.name}.adoption.partial")


def _stage(target: Path, text: str) -> None:
    partial = _partial(target)
    with partial.open("wb") as f:
        f.write(text.encode("utf-8"))
        f.flush()
        os.fsync(f.fileno())
    if target.exists():
        shutil.copymode(target, partial)
