"""Reads a finding of a gate as the start of a bisect: its lane, tests, versions and, if it is SLOWER, slowdowns."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.gate_file import GateFile
from bumpgate.core.text import some
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.state import NAME
from bumpgate.process.runner import options_of

SLOWER = "SLOWER"
# Findings on timed rows other than SLOWER, and why a bisect cannot decide them.
UNDECIDABLE = {
    "SLOW MODE": "only some processes are slow, and a probe has too few to see how often",
    "CREEP": "each step of a drift is too small for a probe",
    "LOST": "a timed test that loses its readings cannot be paired",
}
SHOWN = 4


class GateFindingError(BumpgateError):
    """A gate without the requested finding, or one that a bisect cannot decide. One line."""


@dataclass(frozen=True)
class GateFinding:
    """A finding of a gate that can be bisected.

    nodes: the tests that show it.
    good, bad: package -> version of the adopted and of the candidate side.
    tests: row id -> node id of the slower rows of one test, if the finding is SLOWER.
    ratios: row id -> the candidate's time divided by the adopted build's time.
    sessions: the gate's limit; None without one.
    options: of pytest, as in the gate.
    """

    lane: str
    nodes: tuple[str, ...]
    good: Mapping[str, str]
    bad: Mapping[str, str]
    tests: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    sessions: int | None = None
    options: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return a digest of what decides: the file may be written again, by another gate of the same candidate."""
        content = [self.lane, self.nodes, dict(self.tests), dict(self.ratios), self.sessions, self.options]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def versions(self, package: str) -> tuple[str, str]:
        """Return the versions of a package in the adopted and in the candidate environment.

        Raises GateFindingError if a side lacks the package or both have the same version.
        """
        good, bad = self.good.get(package), self.bad.get(package)
        if good and bad and good != bad:
            return good, bad
        both = sorted(self.good.keys() & self.bad.keys())
        moved = some([name for name in both if self.good[name] != self.bad[name]], SHOWN)
        what = f"{package} is {good} on both sides" if good and bad else f"a side lacks {package}"
        moved = moved or "no version differs"
        raise GateFindingError(f"{what}; name --package ({moved}), or --good and --bad")


def load(path: Path, row: str = "") -> GateFinding:
    """Load the finding of a gate that has `row`, or its worst one. path: gate.json, or the folder that holds it.

    Raises GateFindingError or GateFileError, one line each; also if the evidence of the gate gives another verdict.
    """
    path = path / NAME if path.is_dir() else path
    gate = read_judged(path)
    if not isinstance(gate, GateFile):
        raise GateFindingError(f"{path} is a record: --from-gate needs the {NAME} of a gate")
    return finding_of(path, gate, row)


def finding_of(path: Path, gate: GateFile, row: str = "") -> GateFinding:
    """Return the finding of a gate that has `row`, or its worst one. Raises GateFindingError (one line)."""
    found = _select(path, gate, row)
    if found.label in UNDECIDABLE:
        raise GateFindingError(f"a {found.label} finding cannot be bisected: {UNDECIDABLE[found.label]}")
    records = [side.record for side in (gate.adopted, gate.candidate) if side.record]
    tests = {j.row.id: j.row.test for record in records for j in record.judgements}
    options = options_of(gate.config.get("selection") or (), records[0] if records else None)
    ratios, sessions = {}, None
    if found.label == SLOWER:
        ratios, sessions = _slowdowns_of_one_test(path, gate, found, row, tests), gate.config.get("sessions")
    shown = [name for name in ratios or found.rows if tests.get(name)]
    nodes = tuple(dict.fromkeys(tests[name] for name in shown))
    nodes = nodes or tuple(test for test in found.tests if "::" in test)
    if not nodes:
        raise GateFindingError(
            f"the finding {found.label} names no test: use --lane LANE -- PYTEST-SELECTION"
        )
    return GateFinding(
        gate.lane,
        nodes,
        gate.adopted.packages,
        gate.candidate.packages,
        {name: tests[name] for name in ratios},
        ratios,
        sessions,
        tuple(options),
    )


def _select(path: Path, gate: GateFile, row: str) -> Finding:
    """Return the first finding that holds the candidate back, or the one that has the row."""
    held = [f for f in gate.findings if f.decision is Decision.HOLD]
    if not held:
        raise GateFindingError(f"{path} has no finding that holds the candidate back: nothing to bisect")
    if not row:
        return held[0]
    if found := next((f for f in held if row in f.rows), None):
        return found
    rows = some([name for f in held for name in f.rows], SHOWN) or "none"
    raise GateFindingError(f"no finding of {path} that holds has row {row}; their rows: {rows}")


def _slowdowns_of_one_test(
    path: Path, gate: GateFile, found: Finding, row: str, tests: Mapping[str, str]
) -> dict[str, float]:
    """Return the ratios of the slower rows of the test of `row`, or of the slowest row's test."""
    slower = {
        name: gate.timed[name].ratio
        for name in found.rows
        if name in gate.timed and name in tests and 1 < gate.timed[name].ratio < math.inf
    }
    if not slower or (row and row not in slower):
        raise GateFindingError(
            f"{path} lacks the times or the test of {row or ', '.join(found.rows[:SHOWN])}"
        )
    chosen = row or max(slower, key=lambda name: slower[name])
    return {name: ratio for name, ratio in slower.items() if tests[name] == tests[chosen]}
