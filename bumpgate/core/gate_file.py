"""Reads gate.json, as `bumpgate gate` writes it, with the records of both sides next to it.

Reports are mostly read after failures, so a side without a record is shown as failed instead of raising an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError, loads, one_line
from bumpgate.core.findings import Decision, Finding, TimedOutcome
from bumpgate.core.rows import Record, is_number, read_record

GATE_SCHEMA = 4
# Sessions after which an undecided time can be reviewed: the fewest that can call a row SLOWER.
REVIEWABLE = 16


class GateFileError(BumpgateError):
    """A file that is neither a gate.json nor a record.json."""


@dataclass(frozen=True)
class GateSide:
    """One environment: its record (None if it has none), its packages, and its failures.

    wheels: of an interpreter of the user, the digest of the files of each kernel wheel.
    """

    name: str
    record: Record | None
    failure: str = ""
    canaries: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    git_version: Mapping[str, str] = field(default_factory=dict)
    wheels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Paired:
    """One row of the paired sessions: the ratio of times, candidate over adopted, NaN without a session.

    slow: the slow processes of the candidate, and of the adopted build.
    """

    outcome: str
    ratio: float
    interval: tuple[float, float]
    sessions: int
    log_ratios: tuple[float, ...] = ()
    slow: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class GateFile:
    """One gate. adopted: the adopted environment; candidate: the candidate. started: UTC, ISO 8601.

    finished: False for a gate that was killed. readings: row id -> log-ratio to the build of a month before
    (bumpgate.gate.drift), if the gate was paired with one. config, binding: its options and the work tree that it
    measured, as bumpgate.gate.state writes them. moved: one line per package whose version differs between the sides.
    """

    lane: str
    decision: Decision
    started: str
    wall_seconds: float
    command: str
    adopted: GateSide
    candidate: GateSide
    findings: tuple[Finding, ...]
    timed: Mapping[str, Paired]
    drifts: Mapping[str, Mapping[str, Any]]
    accepted: tuple[str, ...]
    finished: bool = True
    readings: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    binding: Mapping[str, Any] = field(default_factory=dict)
    moved: tuple[str, ...] = ()

    def bounded(self, finding: Finding, row: str) -> bool:
        """Return whether the finding is an undecided time whose interval comes from enough sessions for a review."""
        if (finding.decision, finding.label) != (Decision.UNKNOWN, TimedOutcome.INCONCLUSIVE.value):
            return False
        timed = self.timed.get(row)
        return timed is not None and timed.sessions >= REVIEWABLE and math.isfinite(timed.interval[1])

    def gaps(self) -> list[str]:
        """Return the causes of the gaps in the evidence that no review can close."""
        found = []
        for f in self.findings:
            few = [row for row in f.rows if not self.bounded(f, row)]
            if f.decision is not Decision.UNKNOWN or (f.rows and not few):
                continue
            undecided = f.label == TimedOutcome.INCONCLUSIVE.value and few
            more = (
                f" ({few[0]}: fewer than {REVIEWABLE} sessions, continue with --resume)" if undecided else ""
            )
            found.append(f.cause + more)
        return found


def read(path: Path) -> Record | GateFile:
    """Read a record or a gate, whichever the file holds. Raises GateFileError or RecordError (one line) if neither."""
    try:
        raw = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateFileError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise GateFileError(f"{path}: neither a record nor a gate ({one_line(error)})") from None
    if not isinstance(raw, dict) or "decision" not in raw:
        return read_record(path)
    return parse(path, raw)


def parse(path: Path, raw: dict[str, Any]) -> GateFile:
    """Return the gate with this content. path: its file, whose folder has the records. Raises GateFileError.

    A verdict that is not that of its worst finding is refused; bumpgate.gate.evidence judges it again.
    """
    if raw.get("schema") != GATE_SCHEMA:
        raise GateFileError(
            f"{path}: a gate of schema {raw.get('schema')!r}, this bumpgate reads {GATE_SCHEMA}: run the gate again"
        )
    try:
        found = GateFile(
            lane=str(raw["lane"]),
            decision=Decision[raw["decision"]],
            started=str(raw.get("started", "")),
            wall_seconds=_number(raw.get("wall_seconds")),
            command=str(raw.get("command", "")),
            adopted=_side(path, raw["sides"]["adopted"]),
            candidate=_side(path, raw["sides"]["candidate"]),
            findings=tuple(_finding(f) for f in raw["findings"]),
            timed={str(row): _paired(t) for row, t in raw.get("timed", {}).items()},
            drifts={str(row): dict(c) for row, c in raw.get("drifts", {}).items()},
            accepted=tuple(str(line) for line in raw.get("accepted", ())),
            finished=_typed(raw, "finished", bool),
            readings={
                str(row): _number(x) for row, x in ((raw.get("anchor") or {}).get("readings") or {}).items()
            },
            config=dict(_typed(raw, "config", dict)),
            binding=dict(raw.get("binding") or {}),
            moved=tuple(str(line) for line in raw.get("moved", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise GateFileError(
            f"{path}: corrupt or incomplete gate file ({type(error).__name__}: {one_line(error)})"
        ) from None
    worst = min((f.decision for f in found.findings), key=list(Decision).index, default=Decision.ADOPT)
    if found.finished and found.decision is not worst:
        raise GateFileError(
            f"{path}: states {found.decision.name}, and its worst finding is {worst.name}: gate again"
        )
    return found


def _typed(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field. Raises TypeError if it has another type: a text is no truth value."""
    if not isinstance(raw[name], kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {raw[name]!r}")
    return raw[name]


def _side(path: Path, raw: Mapping[str, Any]) -> GateSide:
    record, failure = None, str(raw.get("failure") or "")
    if raw.get("record"):
        try:
            record = read_record(path.parent / Path(raw["record"]).name)
        except BumpgateError as error:
            failure = failure or str(error)
    words = {name: str(raw.get(name) or "") for name in ("command", "python")}
    tables = {name: _texts(raw.get(name)) for name in ("canaries", "packages", "git_version", "wheels")}
    return GateSide(str(raw["name"]), record, failure, **words, **tables)  # type: ignore[arg-type]


def _finding(raw: Mapping[str, Any]) -> Finding:
    rows, adopted, candidate = (tuple(map(str, raw[name])) for name in ("rows", "adopted", "candidate"))
    label, metric, head, repro = (str(raw[name]) for name in ("label", "metric", "head", "repro"))
    tests = tuple(map(str, raw.get("tests", ())))
    return Finding(Decision[raw["decision"]], label, metric, head, rows, adopted, candidate, repro, tests)


def _paired(raw: Mapping[str, Any]) -> Paired:
    low, high = (_number(x) for x in raw.get("interval") or (None, None))
    candidate, adopted = (int(n) for n in raw.get("slow") or (0, 0))
    sessions, log_ratios = int(raw.get("sessions") or 0), tuple(map(_number, raw.get("log_ratios") or ()))
    slow = candidate, adopted
    return Paired(str(raw["outcome"]), _number(raw.get("ratio")), (low, high), sessions, log_ratios, slow)


def _number(raw: Any) -> float:
    """Convert to float; NaN if it is not a number: gaps of an interrupted gate are shown as gaps."""
    if isinstance(raw, dict):
        raw = float(raw.get("float", "nan"))
    return float(raw) if is_number(raw) else math.nan


def _texts(raw: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in (raw or {}).items() if value is not None}
