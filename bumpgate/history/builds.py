"""The builds that a lane adopted, and how far each of them drifted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from bumpgate.core.accepted import today
from bumpgate.core.baseline import find_root
from bumpgate.core.findings import DriftReading
from bumpgate.history import adoptions
from bumpgate.history.archive import Archive, default_store


def recent(
    lane: str, rows: Sequence[str], days: int, *, store: str = "", day: date | None = None
) -> dict[str, tuple[DriftReading, ...]]:
    """Return row id -> readings of adopted builds against the build of a month before, for `drift.find_drift`."""
    return Archive(store or default_store()).drifted(lane, rows, days, day or today())


def adopted(lane: str, *, store: str = "", root: Path | None = None) -> list[tuple[date, str]]:
    """Return (day, torch) of every build that a lane adopted, oldest first: `drift.anchor` picks from the days.

    Those in the log of `bumpgate adopt` in the work tree of `root`, and of the days before its first entry the
    candidates that passed a gate of the history; without the builds whose adoption was rolled back.
    """
    entries = [a for a in adoptions.load(root or find_root(Path.cwd())).entries if a.lane == lane]
    undone = {_release(a.new) for a in entries if a.rolled_back} - {
        _release(a.new) for a in entries if not a.rolled_back
    }
    first = min((a.day for a in entries), default=date.max)
    passed = Archive(store or default_store()).adopted(lane)
    builds = {(a.day, a.new) for a in entries} | {(day, torch) for day, torch in passed if day < first}
    return sorted((day, torch) for day, torch in builds if _release(torch) not in undone)


def _release(torch: str) -> str:
    """Return a version without the local label, which a wheel's metadata may omit."""
    return torch.partition("+")[0]
