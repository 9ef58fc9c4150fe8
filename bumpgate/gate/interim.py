"""Answers of a gate before its verdict: findings while the lane runs continue, and the first answer after them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record, read_record
from bumpgate.gate.environments import SIDES
from bumpgate.gate.remeasure import outside_on_one_side
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.gate.view import cut, read_progress

# Seconds between two looks at the records, which a lane run saves every few seconds.
LOOK = 10.0
# Seconds between two lines of progress.
PROGRESS = 120.0


def certain_findings(lane: str, adopted: Side, candidate: Side) -> list[Finding]:
    """Return the findings that keep the candidate from being adopted and do not depend on times.

    Both sides must have a record.
    """
    assert adopted.record
    assert candidate.record
    to_time = timed_rows(adopted.record, candidate.record).keys()
    found = (f for f in judge_gate(lane, adopted, candidate).findings if f.decision is not Decision.ADOPT)
    # A finding without rows is a failed test.
    return [f for f in found if not f.rows or not {*f.rows} <= to_time]


def first_answer(findings: list[Finding]) -> list[str]:
    """Return the lines that a gate shows before its sessions, from its certain findings."""
    holding = [f for f in findings if f.decision is Decision.HOLD]
    shown = holding or findings
    if not shown:
        return ["first answer: only the times can still hold the candidate"]
    answer = "HOLD, whatever the times are" if holding else "UNKNOWN, unless the times hold the candidate"
    number = f"{len(shown)} finding{'s' * (len(shown) != 1)}"
    causes = (f"  {f.cause}; {', '.join(cut(f.rows or f.tests))}" for f in shown)
    return [f"first answer: {answer} ({number})", *causes]


@dataclass
class Interim:
    """Compares the rows that both lane runs have saved so far, and reports each cause that holds the candidate once.

    records: path of each side's record, which its run rewrites. started: start of the gate, in time.monotonic().
    again: times outside of a bound on one side will be read once more, so they do not hold yet.
    """

    lane: str
    sides: Mapping[str, Side]
    records: Mapping[str, Path]
    started: float
    say: Callable[[str], None]
    again: bool = False
    shown: set[str] = field(default_factory=set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look every LOOK seconds, until the block ends."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        printed = time.monotonic()
        while not ended.wait(LOOK):
            due = time.monotonic() - printed >= PROGRESS
            for line in [*self.look(progress=due), *(self.runs() if due else ())]:
                self.say(line)
                printed = time.monotonic()

    def runs(self) -> list[str]:
        """Return a line for each running side, of its tests."""
        read = {name: read_progress(path.with_suffix(".progress")) for name, path in self.records.items()}
        return [f"{name}: {found['line']}" for name, found in read.items() if found]

    def look(self, *, progress: bool) -> list[str]:
        """Return a line for each new cause. progress: without one, return a progress line."""
        common = self._common()
        if common is None:
            return []
        adopted, candidate = common
        at = f"{(time.monotonic() - self.started) / 60:.1f} min"
        sides = (replace(self.sides[name], record=found) for name, found in zip(SIDES, common))
        found = certain_findings(self.lane, *sides)
        pending = {*outside_on_one_side(adopted, candidate)} if self.again else set()
        holding = (f for f in found if f.decision is Decision.HOLD)
        causes = {f.cause: f for f in holding if not f.rows or not {*f.rows} <= pending}
        new = [text for text in causes if text not in self.shown]
        self.shown |= {*new}
        lines = [f"{at}: HOLD so far: {text}; {', '.join(cut(causes[text].rows))}" for text in new]
        held = (
            f"{len(self.shown)} cause{'s' * (len(self.shown) != 1)} to hold" if self.shown else "none holds"
        )
        compared = f"{len(candidate.judgements)} row{'s' * (len(candidate.judgements) != 1)} compared"
        return lines or ([f"{at}: {compared}: {held} so far"] if progress else [])

    def _common(self) -> tuple[Record, Record] | None:
        """Return the rows that both records have, as complete records; None without any."""
        found = {}
        for name, path in self.records.items():
            try:
                found[name] = read_record(path)
            except BumpgateError:
                return None  # not written yet
        if found.keys() != {*SIDES}:
            return None
        both = set.intersection(*({j.row.id for j in record.judgements} for record in found.values()))
        parts = (tuple(j for j in found[name].judgements if j.row.id in both) for name in SIDES)
        adopted, candidate = (
            replace(found[name], judgements=part, complete=True, problems=(), tests={})
            for name, part in zip(SIDES, parts)
        )
        return (adopted, candidate) if both else None
