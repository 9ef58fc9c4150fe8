"""State file of a bisect: append-only JSON lines, each synced to disk before it takes effect.

The first line holds the search plan. Then come a decision before each probe and an outcome after it, first of
candidates, then of package mixtures. A line counts once its newline is written: a kill at any byte loses at most the
reading in progress, and the restored search is bitwise equal to the killed one.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bumpgate.bisect.attribution import Mixture
from bumpgate.bisect.search import ProbeOutcome, Search
from bumpgate.core.errors import BumpgateError, one_line

SCHEMA = 1


class JournalError(BumpgateError):
    """State file that cannot be created or resumed. One line: the reason and the fix."""


class JournalExistsError(JournalError):
    """A new bisect would overwrite the state of another one."""


@dataclass(frozen=True)
class BisectPlan:
    """Search plan: the arguments of search.Search, and the command that judges a candidate.

    finding: digest of what a gate's finding decides by, "" without one: the command only names the gate's file.
    """

    candidates: tuple[str, ...]
    good: str
    bad: str
    command: tuple[str, ...]
    false_bad: float | None = None
    false_good: float | None = None
    confidence: float = 0.98
    find_fix: bool = False
    budget: int | None = None
    confirm: int = 2
    finding: str = ""

    def search(self) -> Search:
        """Create the search. Raises search.SearchError if the plan is invalid."""
        arguments = asdict(self)
        del arguments["command"], arguments["finding"]
        return Search(**arguments)


class Journal:
    """A search and the file that restores it. Created by begin and resume; locked until it is closed.

    search: the search with all recorded outcomes. mixtures: readings of package mixtures, in order.
    """

    def __init__(self, file: BinaryIO, plan: BisectPlan) -> None:
        self._file = file
        self.plan = plan
        self.search = plan.search()
        self.mixtures: list[tuple[Mixture, ProbeOutcome]] = []
        self._pending: list[int] = []
        self._pending_mixture: Mixture | None = None

    def decide(self) -> list[int]:
        """Return the probes of the last decision without an outcome; without any, save and return the next one."""
        if self.search.result() is not None:
            return []
        if not self._pending:
            pending = self.search.next()
            _write(self._file, {"probe": pending})
            self._pending = pending
        return list(self._pending)

    def record(self, index: int, outcome: ProbeOutcome) -> None:
        """Write an outcome down, then pass it to the search."""
        _write(self._file, {"index": index, "outcome": outcome.value})
        self._take(index, outcome)

    def decide_mixture(self, mixture: Mixture) -> None:
        """Write down that a mixture is about to be probed."""
        if self._pending_mixture != mixture:
            _write(self._file, {"mixture": sorted(mixture)})
            self._pending_mixture = mixture

    def record_mixture(self, mixture: Mixture, outcome: ProbeOutcome) -> None:
        """Write the reading of a mixture down."""
        _write(self._file, {"mixture": sorted(mixture), "outcome": outcome.value})
        self._take_mixture(mixture, outcome)

    def close(self, *error: object) -> None:
        """Release the lock; the kernel releases it if the process is killed."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    __exit__ = close

    def _take(self, index: int, outcome: ProbeOutcome) -> None:
        self.search.record(index, outcome)
        if index in self._pending:
            self._pending.remove(index)

    def _take_mixture(self, mixture: Mixture, outcome: ProbeOutcome) -> None:
        self.mixtures.append((mixture, outcome))
        self._pending_mixture = None

    def _replay(self, entry: Any) -> None:
        """Apply one entry. Raises KeyError, TypeError or ValueError on an entry that this class does not write."""
        match entry:
            case {"probe": pending, **rest} if not rest:
                self._pending = [int(i) for i in pending]
            case {"index": index, "outcome": outcome, **rest} if not rest:
                self._take(index, ProbeOutcome(outcome))
            case {"mixture": mixture, "outcome": outcome, **rest} if not rest:
                self._take_mixture(frozenset(mixture), ProbeOutcome(outcome))
            case {"mixture": mixture, **rest} if not rest:
                self._pending_mixture = frozenset(mixture)
            case _:
                raise ValueError("not an entry of a journal")


def begin(path: Path, plan: BisectPlan) -> Journal:
    """Create a state file. Raises JournalError if one exists already, unless its first line is incomplete."""
    plan.search()
    file = _open(path, os.O_CREAT)
    existing = file.read()
    start = {"bumpgate": "bisect", "schema": SCHEMA, **asdict(plan)}
    header = _line(start)
    if existing and not (len(existing) < len(header) and header.startswith(existing)):
        file.close()
        raise JournalExistsError(
            f"{path.name} exists: continue it with --resume, or name another --state file"
        )
    file.truncate(0)
    _write(file, start)
    # Sync the directory too: the file's name must survive a power cut, not only its content.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return Journal(file, plan)


def resume(path: Path) -> Journal:
    """Restore the search from the file; a last line without its newline is dropped.

    Raises JournalError (one line) on a file that is missing, in use, or not a state file.
    """
    file = _open(path, 0)
    try:
        lines = file.read().split(b"\n")
        whole = lines[:-1]
        if not whole:
            raise JournalError(f"{path.name} died before its first decision: start again, without --resume")
        journal = Journal(file, _plan(path, whole[0]))
        for number, line in enumerate(whole[1:], start=2):
            try:
                journal._replay(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise JournalError(f"{path.name}: line {number} is damaged ({one_line(error, 80)})") from None
        file.truncate(sum(len(line) + 1 for line in whole))
        return journal
    except BaseException:
        file.close()
        raise


def _open(path: Path, flags: int) -> BinaryIO:
    """Open for appending and lock: two bisects that write to one file would corrupt both."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644), "rb+", 0)
    except OSError as error:
        raise JournalError(f"{path.name}: cannot be opened ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise JournalError(f"{path.name} is in use by another bisect") from None
    return file


def _write(file: BinaryIO, entry: dict[str, Any]) -> None:
    """Append an entry and sync it to disk. On a full disk, truncate the partial line and raise OSError."""
    line = _line(entry)
    end = os.fstat(file.fileno()).st_size
    try:
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _plan(path: Path, line: bytes) -> BisectPlan:
    try:
        raw = json.loads(line)
        if raw.pop("bumpgate") != "bisect" or raw.pop("schema") != SCHEMA:
            raise ValueError
        plan = BisectPlan(**raw | {"candidates": tuple(raw["candidates"]), "command": tuple(raw["command"])})
        plan.search()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise JournalError(f"{path.name} is not a state file of schema {SCHEMA}: name another") from None
    return plan
