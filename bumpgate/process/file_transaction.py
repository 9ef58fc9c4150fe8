"""Changes the reviewed files of a work tree: one writer at a time, and all files of an adoption or none.

Reviewed files are baselines, acceptances, adoptions, locks and the declarations of lanes. A command holds `writing`
from its first read to its last write, and `replace_all` refuses a file that an editor or git changed meanwhile.

A journal holds the old contents while several files are replaced. A journal that remains is from a killed process, and
`recover` restores the old contents. It is kept under the git directory, or in bumpgate's home outside of git: a file
of the work tree may come from anybody.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.rows import write_atomic
from bumpgate.process.home import home
from bumpgate.process.locks import POLL_SECONDS, lock_file, try_lock

REVIEWED = (
    "baselines/*.json",
    "baselines/*.tests",
    "baselines/*.toml",
    f"{lanes.FOLDER}/*/{lanes.FILE}",
    f"{lanes.FOLDER}/*/{lanes.LOCK}",
    lanes.PROJECT,
    lanes.OWN,
)
# Where earlier versions kept the journal.
IN_TREE = "baselines/.adoption.json"
# An adoption resolves and downloads its set while it holds the lock.
SILENT_SECONDS = 2
ADOPTION, ROLLBACK = "adoption", "rollback"


class AdoptionError(BumpgateError):
    """Reviewed files that cannot be changed, or a change that cannot be undone. One line."""


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
    except (FileNotFoundError, NotADirectoryError):
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


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Hold the lock of a tree's reviewed files: every command that changes them waits for the others."""
    folder = private_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / "reviewed.lock") as lock:
        silent_until: float | None = time.monotonic() + SILENT_SECONDS
        while not try_lock(lock):
            if silent_until is not None and time.monotonic() > silent_until:
                print(
                    "another command changes the reviewed files of this tree; waiting for it", file=sys.stderr
                )
                silent_until = None
            time.sleep(POLL_SECONDS)
        yield


def private_folder(root: Path) -> Path:
    """Return the folder of a tree's lock and journal, which no commit can contain."""
    root = root.resolve()
    for folder in (root, *root.parents):
        git = folder / ".git"
        if git.is_file():  # of a worktree or a submodule
            git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        if git.is_dir():
            return git / "bumpgate" / root.relative_to(folder)
    return home() / "trees" / digest(str(root))[:16]


def journal(root: Path) -> Path:
    """Return the path of a tree's journal."""
    return private_folder(root) / "adoption.json"


def replace_all(root: Path, edits: Sequence[Edit], operation: Operation | None = None) -> None:
    """Write every edit. The caller holds `writing`.

    operation: of files that are valid only together. Without one, each file is valid alone, and no journal is kept.
    Raises AdoptionError, before any change, on a file that is no reviewed one or that was changed since it was read;
    OSError after restoring every file of an operation.
    """
    _check_paths(root, [edit.path for edit in edits])
    if found := interrupted(root):
        raise AdoptionError(
            f"{found} was cut short here: undo it with: bumpgate rollback {found.lane} --adoption"
        )
    if moved := [edit.path for edit in edits if read(root / edit.path) != edit.before]:
        raise AdoptionError(f"{moved[0]} was changed by another program meanwhile: repeat the command")
    for edit in edits:
        target = root / edit.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied", str(target))
    if operation is None:
        for edit in edits:
            if edit.after is None:
                (root / edit.path).unlink()
            else:
                write_atomic(root / edit.path, edit.after)
        return
    files = {e.path: {"before": e.before, "after": digest(e.after)} for e in edits}
    journal(root).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(journal(root), json.dumps({**vars(operation), "files": files}) + "\n")
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
    journal(root).unlink()


def interrupted(root: Path) -> Operation | None:
    """Return the operation that was cut short in this tree, if any. Raises AdoptionError on a corrupt journal."""
    found = _journal(root)
    return found[0] if found else None


def recover(root: Path) -> Recovered | None:
    """Undo the changes of a killed process. Return None if there was none. The caller holds `writing`.

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
                f"{path} was edited after {operation} was cut short: restore it with git, then delete {journal(root)}"
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
    journal(root).unlink()
    return Recovered(operation, tuple(moved))


def _check_paths(root: Path, paths: Iterable[str]) -> None:
    """Raise AdoptionError on a path that is no reviewed file below the root."""
    named = [lane.requirements for lane in lanes.load(root).values() if lane.requirements]
    for path in paths:
        parts = PurePosixPath(path)
        inside = not parts.is_absolute() and ".." not in parts.parts
        if not inside or not (path in named or any(fnmatchcase(path, glob) for glob in REVIEWED)):
            raise AdoptionError(f"{path!r} is no reviewed file of this repository: nothing is changed")


def _journal(root: Path) -> tuple[Operation, dict[str, tuple[str | None, str]]] | None:
    """Return the operation of the journal, and path -> (old content, digest of the new one). None without a journal."""
    if os.path.lexists(root / IN_TREE):
        raise AdoptionError(
            f"{IN_TREE}: a journal in the work tree may be anybody's, and is never obeyed: delete it"
        )
    place = journal(root)
    try:
        text = read(place)
        if text is None:
            return None
        raw = json.loads(text)
        files = {str(path): (_text(e["before"]), str(e["after"])) for path, e in raw["files"].items()}
        operation = Operation(str(raw["kind"]), str(raw["lane"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 80)
        raise AdoptionError(
            f"{place}: not a journal ({why}): restore the tree with git, then delete it"
        ) from None
    _check_paths(root, files)
    return operation, files


def _text(raw: object) -> str | None:
    if raw is not None and not isinstance(raw, str):
        raise TypeError(f"before must be a text, got {raw!r}")
    return raw


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
