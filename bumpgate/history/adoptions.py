"""baselines/adoptions.toml: the build that each lane adopted, when, after which gate, and the reviewed rows."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from bumpgate.core.accepted import today
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import one_line
from bumpgate.core.findings import DriftReading
from bumpgate.core.rows import is_finite, write_atomic
from bumpgate.core.toml import tomllib
from bumpgate.history.archive import Archive, default_store
from bumpgate.process import file_transaction
from bumpgate.process.file_transaction import AdoptionError, Edit, Operation, digest, read, replace_all
from bumpgate.process.home import home

FILE = "baselines/adoptions.toml"
HEAD = """\
# The builds that were adopted, oldest first: `bumpgate adopt` adds an entry, `bumpgate rollback --adoption` closes it.
# A lane is listed as unverified from then on until the set before is rebuilt and its smoke suite is green.
"""


# Fields of an entry in the order of the file, the names that differ there, and the fields that are left out if empty.
FIXED = ("lane", "day", "candidate", "old", "new", "decision", "gate", "commit")
ORDER = (*FIXED, "rolled_back", "without", "not_in_lock", "before", "after", "reviewed")
NAMES = {"old": "from", "new": "to"}
OPTIONAL = {"rolled_back", "without", "not_in_lock", "reviewed"}


@dataclass(frozen=True)
class ReviewedFinding:
    """A reviewed finding of an adopted build: its row, what the gate found, and why it is accepted."""

    row: str
    finding: str
    reason: str


@dataclass(frozen=True)
class Adoption:
    """One entry.

    old, new: the versions of torch. gate: sha256 of gate.json. commit: of the gated tree, "" outside git.
    before, after: path -> sha256 of each file that was written, "" if it did not exist.
    without: kernel wheels that the set gave up.
    not_in_lock: packages of a gated interpreter that the set does not have, as the adopted side had them.
    """

    lane: str
    day: date
    candidate: str
    old: str
    new: str
    decision: str
    gate: str
    commit: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    reviewed: tuple[ReviewedFinding, ...] = ()
    rolled_back: date | None = None
    without: tuple[str, ...] = ()
    not_in_lock: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """Every adoption, oldest first. unverified: lanes whose files were restored, and whose set is not rebuilt yet."""

    entries: tuple[Adoption, ...] = field(default_factory=tuple)
    unverified: frozenset[str] = frozenset()

    def last(self, lane: str) -> Adoption | None:
        """Return the current adoption of a lane."""
        return next((a for a in reversed(self.entries) if a.lane == lane and a.rolled_back is None), None)

    def adding(self, entry: Adoption) -> Log:
        """Return the log with a new adoption, after which an earlier rollback of its lane need not be finished."""
        return Log((*self.entries, entry), self.unverified - {entry.lane})


def load(root: Path) -> Log:
    """Read the log. Raises AdoptionError (one line) on a file that `text` did not write."""
    found = read(root / FILE)
    if found is None:
        return Log()
    try:
        raw = tomllib.loads(found)
        return Log(
            tuple(map(_entry, raw.get("adoption", ()))), frozenset(map(str, raw.get("unverified", ())))
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 80)
        fault = f"{FILE}: not a list of adoptions ({why}): restore it: git checkout {FILE}"
        raise AdoptionError(fault) from None


def text(log: Log) -> str:
    """Format the log as its file."""
    import tomlkit

    entries = [
        {NAMES.get(name, name): values[name] for name in ORDER if values[name] or name not in OPTIONAL}
        for values in map(asdict, log.entries)
    ]
    unverified = {"unverified": sorted(log.unverified)} if log.unverified else {}
    return HEAD + tomlkit.dumps({**unverified, "adoption": entries})


def _entry(raw: Mapping[str, Any]) -> Adoption:
    """Read one entry. Raises KeyError, TypeError, ValueError or AttributeError on anything else."""
    values: dict[str, Any] = {name: raw[NAMES.get(name, name)] for name in ORDER if name not in OPTIONAL}
    values |= {name: raw[name] for name in OPTIONAL & raw.keys()}
    for name, value in values.items():
        if name in ("day", "rolled_back"):
            if not isinstance(value, date):
                raise ValueError(f"{name} must be a day")
        elif name in ("before", "after", "not_in_lock"):
            values[name] = {str(key): str(text) for key, text in value.items()}
        elif name == "without":
            values[name] = tuple(map(str, value))
        elif name == "reviewed":
            values[name] = tuple(ReviewedFinding(**found) for found in value)
        else:
            values[name] = str(value)
    if values["before"].keys() != values["after"].keys():
        raise ValueError("before and after name other files")
    return Adoption(**values)


def keep(edits: Sequence[Edit]) -> None:
    """Store the old contents by their hash, for `undo`."""
    folder = home() / "adoptions"
    folder.mkdir(parents=True, exist_ok=True)
    for edit in edits:
        if edit.before is not None:
            write_atomic(folder / digest(edit.before), edit.before)


def undo(root: Path, lane: str, day: date) -> Adoption:
    """Restore the files that the last adoption of a lane wrote, and close its entry; the lane is unverified then.

    Raises AdoptionError if there is none, a file was edited since, or its old content is not available; OSError.
    """
    log = load(root)
    entry = log.last(lane)
    if entry is None:
        raise AdoptionError(f"lane {lane} has no adoption to undo: {FILE} lists them")
    now = {path: read(root / path) for path in entry.after}
    edited = [path for path, sha256 in entry.after.items() if digest(now[path]) != sha256]
    if edited:
        why = f"{', '.join(edited)} changed since {entry.new} was adopted on {entry.day}: nothing is restored"
        raise AdoptionError(f"{why}; undo that change first, or revert the adoption's commit")
    edits = [Edit(path, now[path], _old(root, entry, path)) for path in entry.after]
    entries = tuple(replace(a, rolled_back=day) if a is entry else a for a in log.entries)
    edits.append(Edit(FILE, read(root / FILE), text(Log(entries, log.unverified | {lane}))))
    replace_all(root, edits, Operation(file_transaction.ROLLBACK, lane))
    return entry


def set_unverified(root: Path, lane: str, unverified: bool) -> None:
    """List a lane as unverified, or not any more. Raises AdoptionError, OSError."""
    log = load(root)
    lanes = log.unverified | {lane} if unverified else log.unverified - {lane}
    new = text(Log(log.entries, lanes)) if log.entries or lanes else None
    if (before := read(root / FILE)) != new:
        replace_all(root, [Edit(FILE, before, new)])


def _old(root: Path, entry: Adoption, path: str) -> str | None:
    """Return the content of a file before an adoption, from this machine's copies or from git."""
    sha256 = entry.before[path]
    if not sha256:
        return None
    kept = read(home() / "adoptions" / sha256)
    if digest(kept) == sha256:
        return kept
    found = None
    if entry.commit:
        shown = subprocess.run(["git", "show", f"{entry.commit}:./{path}"], cwd=root, capture_output=True)
        found = shown.stdout.decode("utf-8", "replace")
    if digest(found) != sha256:
        why = f"its content before the adoption is neither in {home() / 'adoptions'} nor in git"
        raise AdoptionError(f"{path}: {why}: revert the adoption's commit instead")
    return found


def recent(
    lane: str, rows: Sequence[str], days: int, *, store: str = "", day: date | None = None
) -> dict[str, tuple[DriftReading, ...]]:
    """Return row id -> readings of adopted builds against the build of a month before, for `drift.find_drift`."""
    return Archive(store or default_store()).drifted(lane, rows, days, day or today())


def oldest(
    lane: str, rows: Sequence[str], days: int, *, store: str = "", root: Path | None = None
) -> dict[str, float]:
    """Return row id -> its oldest right value of the last `days`, or since the adoption that last reviewed it."""
    archive = Archive(store or default_store())
    entries = [a for a in load(root or find_root(Path.cwd())).entries if a.lane == lane and not a.rolled_back]
    found = {}
    for row in rows:
        since = max((a.day for a in entries if any(r.row == row for r in a.reviewed)), default=date.min)
        right = (p.value for p in archive.points(row, lane, days) if p.verdict == "PASS" and p.day >= since)
        if is_finite(value := next(right, None)):
            found[row] = value
    return found


def adopted(lane: str, *, store: str = "", root: Path | None = None) -> list[tuple[date, str]]:
    """Return (day, torch) of every build that a lane adopted, oldest first: `drift.anchor` picks from the days.

    They are in the log of `bumpgate adopt` in the tree of `root`. Before its first entry, the candidates that passed
    a gate of the history count. Builds whose adoption was rolled back are left out.
    """
    entries = [a for a in load(root or find_root(Path.cwd())).entries if a.lane == lane]
    undone = {_release(a.new) for a in entries if a.rolled_back}
    undone -= {_release(a.new) for a in entries if not a.rolled_back}
    first = min((a.day for a in entries), default=date.max)
    passed = Archive(store or default_store()).adopted(lane)
    builds = {(a.day, a.new) for a in entries} | {(day, torch) for day, torch in passed if day < first}
    return sorted((day, torch) for day, torch in builds if _release(torch) not in undone)


def _release(torch: str) -> str:
    """Return a version without the local label, which a wheel's metadata may omit."""
    return torch.partition("+")[0]
