"""Memory of findings: when each was first and last seen, whether it is gone, its known issue and its owner.

Only findings that keep a gate from ADOPT are remembered. A finding is identified by its lane, the package of the
candidate, its label, metric and evidence without numbers. Gates are read in the order in which they started, so a
gate may be added late.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bumpgate.core.errors import BumpgateError, loads
from bumpgate.core.findings import NO_REGRESSION, Decision, TimedOutcome
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Verdict
from bumpgate.env.freeze import changes

NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?!\w)")
EVIDENCE = 8  # lines that are kept of each side
NEW, STILL, BACK, GONE, UNMEASURED = "new", "still there", "back", "gone", "not measured"
# Outcomes of paired sessions that decide a row, and row verdicts that do not decide.
DECIDED = {o.value for o in (*NO_REGRESSION, TimedOutcome.SLOWER, TimedOutcome.SLOW_MODE)}
OPEN = {
    v.value for v in (Verdict.MISSING, Verdict.NEW, Verdict.INSTRUMENT, Verdict.INFRA, Verdict.INCONCLUSIVE)
}
OF_SESSIONS = (TimedOutcome.SLOWER.value, TimedOutcome.SLOW_MODE.value, "LOST")


class FindingError(BumpgateError):
    """No such finding, or an invalid link or owner."""


@dataclass
class Known:
    """One remembered finding, as of the latest gate of its lane and package.

    first, last: start of the first and the last gate that showed it. gates: how many showed it.
    gone: start of the gate that showed it gone; None if it is open. state: in the latest gate.
    added: rows that the gate before did not show. rows ... moved: of the last gate that showed it.
    module: the file of its test. moved: the packages that differ between the sides.
    """

    key: str
    lane: str
    package: str
    label: str
    metric: str
    issue: str | None = None
    owner: str | None = None
    topic: str | None = None
    first: str = ""
    last: str = ""
    gone: str | None = None
    gates: int = 0
    state: str = NEW
    added: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()
    head: str = ""
    repro: str = ""
    decision: str = ""
    module: str = ""
    moved: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Label, metric and first line of evidence."""
        return " ".join(filter(None, (self.label, self.metric, self.head)))


def package_of(config: Mapping[str, Any]) -> str:
    """Return the package that a gate judges; "" for an interpreter as it is."""
    text = str(config.get("candidate") or "")
    try:
        if text.endswith(".whl"):
            return str(parse_wheel_filename(PurePosixPath(text).name)[0])
        return str(canonicalize_name(Requirement(text).name)) if text else ""
    except ValueError:
        return text


def gate_fields(gate: GateFile) -> dict[str, Any]:
    """Return the columns of a gate that the memory needs."""
    records = (gate.adopted.record, gate.candidate.record)
    whole = not gate.config.get("selection") and all(r is not None and r.complete for r in records)
    moved = changes(gate.adopted.packages, gate.candidate.packages)
    return {"package": package_of(gate.config), "whole": whole, "moved": json.dumps(list(moved))}


def write(sql: Any, tables: Mapping[str, Any], connection: Any, made: int, gate: GateFile) -> None:
    """Store the sightings of a gate. made: its number."""
    found, sightings = tables["findings"], tables["sightings"]
    records = (gate.adopted.record, gate.candidate.record)
    tests = {j.row.id: j.row.test for r in records if r for j in r.judgements}
    package = package_of(gate.config)
    seen: dict[str, int] = {}
    for f in (f for f in gate.findings if f.decision is not Decision.ADOPT):
        signature = [gate.lane, package, f.label, f.metric, NUMBER.sub("#", f.head)]
        again = seen[str(signature)] = seen.get(str(signature), 0) + 1
        # Two findings of one gate that differ in a number only remain two.
        key = hashlib.sha256(json.dumps([*signature, again]).encode()).hexdigest()[:12]
        if not connection.execute(sql.select(found.c.key).where(found.c.key == key)).first():
            fields = {"key": key, "lane": gate.lane, "package": package, "label": f.label, "metric": f.metric}
            connection.execute(sql.insert(found).values(**fields))
        tested = next((tests[row] for row in f.rows if tests.get(row)), "") or next(iter(f.tests), "")
        detail: dict[str, Any] = {
            "rows": f.rows,
            "adopted": f.adopted[:EVIDENCE],
            "candidate": f.candidate[:EVIDENCE],
        }
        detail |= {"head": f.head, "repro": f.repro, "decision": f.decision.name}
        detail["module"] = tested.partition("::")[0]
        values = {"gate": made, "finding": key, "detail": json.dumps(detail)}
        connection.execute(sql.insert(sightings).values(**values))


def read(
    sql: Any, tables: Mapping[str, Any], connection: Any, lane: str = "", until: int | None = None
) -> list[Known]:
    """Return every finding, open ones first, each as of the latest gate of its lane and package.

    until: number of a gate; only its lane and package, as of that gate.
    """
    gates, sightings, found = tables["gates"], tables["sightings"], tables["findings"]
    query = sql.select(gates).order_by(gates.c.started, gates.c.id)
    if until is not None:
        last = connection.execute(sql.select(gates).where(gates.c.id == until)).one()
        query = query.where(gates.c.lane == last.lane, gates.c.package == last.package)
    elif lane:
        query = query.where(gates.c.lane == lane)
    of_gate: dict[int, dict[str, Any]] = {}
    chosen = query.with_only_columns(gates.c.id).order_by(None)
    for number, key, detail in connection.execute(sql.select(sightings).where(sightings.c.gate.in_(chosen))):
        of_gate.setdefault(number, {})[key] = loads(detail)
    texts = {row.key: dict(row._mapping) for row in connection.execute(sql.select(found))}
    known: dict[str, Known] = {}
    for gate in connection.execute(query).all():
        seen = of_gate.get(gate.id, {})
        for key, detail in seen.items():
            _see(known.setdefault(key, Known(**texts[key])), gate, detail)
        blocked = {row for detail in seen.values() for row in detail["rows"]}
        for one in known.values():
            if (one.lane, one.package) != (gate.lane, gate.package) or one.key in seen or one.gone:
                continue
            gone = blocked.isdisjoint(one.rows) and _measured(sql, tables, connection, gate, one)
            one.state, one.added = (GONE, ()) if gone else (UNMEASURED, ())
            one.gone = gate.started if gone else None
        if gate.id == until:
            known = {key: one for key, one in known.items() if one.gone in (None, gate.started)}
            break
    return sorted(known.values(), key=lambda k: (k.gone is not None, k.first, k.key))


def _see(one: Known, gate: Any, detail: Mapping[str, Any]) -> None:
    """Update a finding with a gate that shows it."""
    rows = tuple(detail["rows"])
    one.state = NEW if not one.gates else BACK if one.gone else STILL
    one.added = tuple(row for row in rows if row not in one.rows) if one.gates else ()
    one.first, one.last, one.gone = one.first or gate.started, gate.started, None
    one.gates += 1
    for name, value in detail.items():
        setattr(one, name, tuple(value) if isinstance(value, list) else value)
    one.moved = tuple(loads(gate.moved or "[]"))


def _measured(sql: Any, tables: Mapping[str, Any], connection: Any, gate: Any, one: Known) -> bool:
    """Whether a gate without the finding measured all that would have shown it."""
    if not one.rows:
        return bool(gate.whole)
    ratios, readings = tables["ratios"], tables["readings"]
    paired = sql.select(ratios).where(ratios.c.gate == gate.id, ratios.c.row.in_(one.rows))
    sessions = {row.row: row for row in connection.execute(paired)}
    if one.label == "CREEP":
        return all(row in sessions and sessions[row].drift is not None for row in one.rows)
    rest = {row for row in one.rows if row not in sessions or sessions[row].outcome not in DECIDED}
    if one.label in OF_SESSIONS and rest:
        return False
    for run in (gate.adopted, gate.candidate):
        query = sql.select(readings.c.row, readings.c.verdict)
        query = query.where(readings.c.run == run, readings.c.row.in_(rest))
        # A verdict is stored with its note: INCONCLUSIVE (not judged).
        measured = {row for row, label in connection.execute(query) if label.partition(" (")[0] not in OPEN}
        if not measured.issuperset(rest):
            return False
    return True


def line(one: Known) -> str:
    """Format a finding as one line: state, key, what it is, since when, link and owner."""
    rows = f"{len(one.rows)} row{'s' * (len(one.rows) != 1)}" if one.rows else ""
    more = f"{len(one.added)} more than before" if one.added else ""
    times = "" if one.gates == 1 else f" ({one.gates} gates)"
    since = f"since {one.first[:10]}{times}"
    when = f"last seen {one.last[:10]}" if one.state in (GONE, UNMEASURED) else ""
    gone = f"gone {one.gone[:10]}" if one.gone else ""
    parts = (one.title, rows, more, since, when, gone, one.owner, one.issue)
    return f"{one.state:12}  {one.key}  {'; '.join(p for p in parts if p)}"
