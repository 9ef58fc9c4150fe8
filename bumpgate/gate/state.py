"""State of a gate, and gate.json: its options, its measurements so far and, when it has finished, its verdict.

The file is written atomically after every step, so a killed gate leaves a valid file: UNKNOWN, not finished, with all
that `--resume` needs. Readers of a finished gate use bumpgate.core.gate_file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from bumpgate.core import gate_file
from bumpgate.core.accepted import Acceptance
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.findings import Decision, DriftReading, Finding
from bumpgate.core.gate_file import GATE_SCHEMA, GateFile
from bumpgate.core.rows import write_atomic
from bumpgate.core.text import redacted
from bumpgate.env.freeze import changes
from bumpgate.gate.drift import Drift
from bumpgate.gate.plan import SessionPlan, plan_of
from bumpgate.gate.sequential import Timed, estimate
from bumpgate.gate.timed import Sessions
from bumpgate.process.tree_digest import Binding

NAME = "gate.json"
# Fields from which the verdict follows.
EVIDENCE = ("lane", "config", "host", "started", "binding", "sides", "sessions", "anchor", "inputs")
# The option of pytest that selects the part of a lane that a fast gate measures.
FAST = "--fast"
# Options and fields of gate.json, which are lists there.
LISTS = ("selection", "without")


class GateError(BumpgateError):
    """Gate that cannot be started or resumed. One line: the reason and the fix."""


@dataclass(frozen=True)
class GateConfig:
    """What a gate measures; `--resume` requires the same. Interpreters and requirements as the user wrote them.

    candidate_file: sha256 of a candidate that is a wheel file; its version alone may stand for several builds.
    adopted: a requirement that changes the adopted set.
    anchor: the older build that is paired with the candidate, too.
    python_*: interpreters instead of requirements.
    sessions: the maximum; None for the plan's.
    selection: of pytest.
    without: kernel wheels that an interpreter of the user lacks on purpose.
    command: prints metrics, in place of the pytest selection.
    base: the commit of the project that the adopted side imports; the candidate imports the work tree.
    """

    lane: str
    candidate: str = ""
    adopted: str = ""
    anchor: str = ""
    python_adopted: str = ""
    python_candidate: str = ""
    python_anchor: str = ""
    sessions: int | None = None
    selection: tuple[str, ...] = ()
    candidate_file: str = ""
    without: tuple[str, ...] = ()
    command: str = ""
    base: str = ""

    @property
    def fast(self) -> bool:
        """Whether only tests of a few seconds run, without paired sessions: an early answer that cannot adopt."""
        return FAST in self.selection

    @property
    def requests(self) -> dict[str, tuple[str, str]]:
        """Return side -> its interpreter and its requirement, of which the user named one at most."""
        found = {
            "adopted": (self.python_adopted, self.adopted),
            "candidate": (self.python_candidate, self.candidate),
            "anchor": (self.python_anchor, self.anchor),
        }
        return {name: pair for name, pair in found.items() if name != "anchor" or any(pair)}


@dataclass(frozen=True)
class SideState:
    """State of one environment.

    canaries: name -> reason of the failed ones; None until they have run.
    measured: its one run has finished.
    record: a file next to gate.json; None if the run left none.
    command: rebuilds the environment.
    python: its interpreter.
    kept: start of the earlier run that the record is from (bumpgate.gate.adopted_run_cache), "" for none.
    wheels: of an interpreter of the user, the digest of the files of each kernel wheel: one version may be built for
        several versions of torch.
    read_again: its times outside of a bound have been read once more (bumpgate.gate.remeasure).
    artifacts: package -> sha256 of its files in the resolved lock; empty without a lock.
    """

    name: str = ""
    failure: str = ""
    canaries: Mapping[str, str] | None = None
    measured: bool = False
    record: str | None = None
    command: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    git_version: Mapping[str, str] = field(default_factory=dict)
    kept: str = ""
    wheels: Mapping[str, str] = field(default_factory=dict)
    read_again: bool = False
    artifacts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def equals(self, other: SideState) -> bool:
        """Whether both have the same packages: versions, commits, kernel wheels, and files where locks name them."""
        mine, its = self.artifacts, other.artifacts
        same = all(getattr(self, n) == getattr(other, n) for n in ("packages", "git_version", "wheels"))
        other_files = any({*mine[n]}.isdisjoint(its[n]) for n in mine.keys() & its)
        return bool(self.packages) and same and not other_files


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a verdict depends on apart from the sides, their records and the sessions.

    plan: of the sessions.
    today: day of the verdict.
    acceptances: of the lane.
    readings: row id -> earlier readings against an anchor.
    tree: how the work tree changed during the gate.
    oldest: row id -> its oldest value in the history, of rows with a change that holds nothing.
    """

    plan: SessionPlan
    today: date
    acceptances: tuple[Acceptance, ...] = ()
    readings: Mapping[str, Sequence[DriftReading]] = field(default_factory=dict)
    tree: tuple[str, ...] = ()
    oldest: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Inputs:
        """Create inputs from gate.json. Raises KeyError, TypeError or ValueError on anything else."""
        day = date.fromisoformat
        return cls(
            plan=plan_of(raw["plan"]),
            today=day(raw["today"]),
            acceptances=tuple(
                Acceptance(**a | {name: day(a[name]) for name in ("since", "expires")})
                for a in raw["acceptances"]
            ),
            readings={
                row: [DriftReading(day(r["day"]), r["log_ratio"]) for r in series]
                for row, series in raw["readings"].items()
            },
            tree=tuple(raw["tree"]),
            oldest=dict(raw["oldest"]),
        )


@dataclass(frozen=True)
class Gate:
    """State of a gate.

    wall_seconds: over all resumes.
    sides: adopted, candidate, and anchor if one is paired.
    paired: sessions of the candidate with the adopted build; None until the timed rows are known.
    drifted: the same with the anchor.
    drifts: of each row the first drift that is not accepted, else the last accepted one.
    accepted: one line per acceptance that was used or has expired.
    host: the class of the machine, which must not change.
    binding: the work tree that it measures.
    inputs: of its verdict; None until it is judged.
    """

    config: GateConfig
    started: str
    command: str
    wall_seconds: float = 0.0
    finished: bool = False
    decision: Decision = Decision.UNKNOWN
    sides: Mapping[str, SideState] = field(
        default_factory=lambda: {"adopted": SideState(), "candidate": SideState()}
    )
    paired: Sessions | None = None
    drifted: Sessions | None = None
    findings: tuple[Finding, ...] = ()
    timed: Mapping[str, Timed] = field(default_factory=dict)
    drifts: Mapping[str, Drift] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()
    host: str = ""
    binding: Binding | None = None
    inputs: Inputs | None = None

    def with_side(self, name: str, side: SideState) -> Gate:
        """Return the gate with another state of one side."""
        return replace(self, sides={**self.sides, name: side})

    def changed(self, name: str, **changes: Any) -> Gate:
        """Return the gate with these fields of one side changed."""
        return self.with_side(name, replace(self.sides[name], **changes))

    @property
    def failed(self) -> bool:
        """Whether the adopted or the candidate environment cannot be measured."""
        return any(self.sides[name].failure for name in ("adopted", "candidate"))

    @property
    def undecided(self) -> bool:
        """Whether more sessions could decide a timed row: the gate ran out of budget."""
        return any(part is not None and bool(part.open_tests()) for part in (self.paired, self.drifted))

    @property
    def moved(self) -> list[str]:
        """Return one line per package whose version differs between the sides; empty if a side is unknown."""
        adopted, candidate = (self.sides[name].packages for name in ("adopted", "candidate"))
        return changes(adopted, candidate) if adopted and candidate else []

    def write(self, out: Path) -> None:
        """Replace gate.json atomically, without secrets, and with the digests of its evidence if it has finished."""
        raw = json.loads(redacted(json.dumps(self.to_json(), allow_nan=False)))
        raw |= {"digests": digests(raw, out)} if self.finished else {}
        write_atomic(out / NAME, json.dumps(raw, indent=1) + "\n")

    def file(self, out: Path) -> GateFile:
        """Return the gate as its readers see gate.json in this folder."""
        return gate_file.parse(out / NAME, self.to_json())

    def to_json(self) -> dict[str, Any]:
        paired = self.paired or Sessions({}, None, 0)
        return {
            "schema": GATE_SCHEMA,
            "lane": self.config.lane,
            "decision": self.decision.name,
            "exit_code": self.decision.value,
            "finished": self.finished,
            "started": self.started,
            "wall_seconds": round(self.wall_seconds, 1),
            "host": self.host,
            "command": self.command,
            "config": asdict(self.config),
            "binding": self.binding.to_json() if self.binding else None,
            "sides": {name: asdict(side) for name, side in self.sides.items()},
            "findings": [asdict(f) | {"decision": f.decision.name} for f in self.findings],
            "timed": {row: _timed(self.timed.get(row), x) for row, x in paired.log_ratios.items()},
            "sessions": _sessions(self.paired),
            "anchor": _sessions(self.drifted),
            "drifts": {
                row: asdict(c) | {"since": c.since.isoformat(), "called": c.called.isoformat()}
                for row, c in self.drifts.items()
            },
            "accepted": list(self.accepted),
            "moved": self.moved,
            "inputs": self.inputs and json.loads(json.dumps(asdict(self.inputs), default=date.isoformat)),
        }


def digests(raw: Mapping[str, Any], out: Path) -> dict[str, str]:
    """Return the sha256 of each record of a gate, by file name, and of the other evidence in its gate.json."""
    files = [side["record"] for side in raw["sides"].values() if side["record"]]
    own = json.dumps({name: raw.get(name) for name in EVIDENCE}, sort_keys=True)
    found = {name: (out / name).read_bytes() for name in files if (out / name).is_file()}
    return {name: hashlib.sha256(x).hexdigest() for name, x in {**found, "evidence": own.encode()}.items()}


def read(out: Path, plan: SessionPlan) -> Gate | None:
    """Load the gate in a directory, to resume it; None if there is none. plan: of its paired sessions.

    Raises GateError on a file that `Gate.write` did not write.
    """
    path = out / NAME
    try:
        return parse(path, json.loads(path.read_text(encoding="utf-8")), plan)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GateError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise GateError(
            f"{path}: not a gate that can be resumed ({one_line(error)}): name another --out"
        ) from None


def parse(path: Path, raw: dict[str, Any], plan: SessionPlan | None = None) -> Gate:
    """Return the state with this content of a gate.json. plan: of a gate that was not judged yet.

    Raises GateError on content that `Gate.write` did not write.
    """
    try:
        if raw["schema"] != GATE_SCHEMA:
            raise ValueError(f"schema {raw['schema']!r}, this bumpgate reads {GATE_SCHEMA}")
        inputs = Inputs.from_json(raw["inputs"]) if raw["inputs"] else None
        return Gate(
            GateConfig(**raw["config"] | {name: tuple(raw["config"].get(name, ())) for name in LISTS}),
            raw["started"],
            raw["command"],
            wall_seconds=raw["wall_seconds"],
            finished=raw["finished"],
            decision=Decision[raw["decision"]],
            host=raw["host"],
            binding=Binding.from_json(raw["binding"]) if raw["binding"] else None,
            sides={name: SideState(**side) for name, side in raw["sides"].items()},
            paired=_read_sessions(raw["sessions"], plan or (inputs.plan if inputs else None)),
            drifted=_read_sessions(raw["anchor"], None),
            inputs=inputs,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 80)
        raise GateError(f"{path}: not a gate that can be resumed ({why}): name another --out") from None


def _timed(t: Timed | None, log_ratios: list[float]) -> dict[str, Any]:
    """Convert one timed row to JSON. `t` is None before the verdict."""

    def finite(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "outcome": t.outcome.value if t else "INCONCLUSIVE",
        "ratio": finite(t.ratio) if t else None,
        "interval": [finite(x) for x in t.interval] if t else [None, None],
        "sessions": len(log_ratios),
        "p": t.p if t else None,
        "slow": list(t.slow) if t else [0, 0],
        "log_ratios": log_ratios,
    }


def _sessions(sessions: Sessions | None) -> dict[str, Any] | None:
    """Convert sessions to JSON. readings: the estimate per row, which the history keeps for sessions with an anchor."""
    if sessions is None:
        return None
    readings = {row: estimate(x) for row, x in sessions.log_ratios.items() if x}
    return sessions.to_json() | {"readings": readings}


def _read_sessions(raw: Any, plan: SessionPlan | None) -> Sessions | None:
    if raw is None:
        return None
    return Sessions.from_json({name: value for name, value in raw.items() if name != "readings"}, plan)
