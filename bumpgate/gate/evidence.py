"""The verdict of a gate as a function of its evidence, and gates that are read: each is judged again from its files.

gate.json holds what the verdict depends on (its options, sides, sessions and `Inputs`) and the digests of that and of
both records. A file whose findings do not follow from its evidence is refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bumpgate.core import gate_file
from bumpgate.core.baseline import investigate
from bumpgate.core.errors import loads, one_line
from bumpgate.core.findings import Decision, Finding, group
from bumpgate.core.gate_file import GateFile, GateFileError
from bumpgate.core.rows import Problem, Record
from bumpgate.core.text import redacted
from bumpgate.gate import state
from bumpgate.gate.drift import apply_to_times, find_drifts
from bumpgate.gate.sequential import summarise
from bumpgate.gate.state import FAST, Gate
from bumpgate.gate.timed import Sessions
from bumpgate.gate.verdict import NOT_RUN, Side, added_up, judge_gate
from bumpgate.process.runner import by_hand
from bumpgate.table import part_of_lane

# What the evidence decides. A command that reproduces a finding also depends on where the gate ran.
DECIDED = ("decision", "exit_code", "findings", "timed", "drifts", "accepted", "moved")


def judge(
    gate: Gate, records: Mapping[str, Record | None], root: Path = Path(), options: Sequence[str] = ()
) -> Gate:
    """Return the gate with its decision and findings. Its `inputs` are known.

    records: side -> its record.
    root, options: for the lines that reproduce a finding: the work tree, and the options of pytest.
    """
    assert gate.inputs
    lane, sides, inputs = gate.config.lane, sides_of(gate, records), gate.inputs
    alone: list[Problem] = []
    if gate.paired:
        sides, alone = _with_faults(sides, gate.paired)
        if gate.drifted:
            drift_faults = gate.drifted.problems("candidate")
            sides = {**sides, "candidate": _with_problems(sides["candidate"], drift_faults)}
        gate = replace(gate, timed=summarise(gate.paired.log_ratios, inputs.plan, gate.paired.family))
    drifted = gate.drifted.log_ratios if gate.drifted else {}
    found = find_drifts(inputs.readings, lane, list(gate.timed), drifted, inputs.today, inputs.acceptances)
    timed, crept, lines = apply_to_times(gate.timed, found, inputs.acceptances, lane, inputs.today)
    verdict = judge_gate(
        lane, sides["adopted"], sides["candidate"], timed, crept, gate.paired.lost if gate.paired else ""
    )
    crept_up = added_up(lane, verdict.findings, records.get("candidate"), inputs.oldest)
    # A fault of the adopted side's timed processes costs a reading, and a row with too few is INCONCLUSIVE.
    shown = [
        Finding(Decision.ADOPT, "PROBLEM", "", p.why, (), (str(p),), (), investigate(lane, p.test), (p.test,))
        for p in alone
    ]
    lost = _unequal_losses(lane, gate.paired) if gate.paired else []
    anchor = _anchor_gaps(gate, root, options)
    gaps = _gaps(gate, records.get("candidate"))
    findings = group([*verdict.findings, *crept_up, *shown, *lost, *anchor, *gaps])
    return replace(
        gate,
        drifts={row: drifts[-1] for row, drifts in found.items()},
        decision=findings[0].decision if findings else Decision.ADOPT,
        findings=tuple(_with_interpreter(gate, f, root, options) for f in findings),
        accepted=tuple(lines),
    )


def read_judged(path: Path) -> Record | GateFile:
    """Read a record, or a gate whose verdict is judged again if it has finished.

    Raises GateFileError or RecordError (one line) if neither, and if the evidence gives another verdict.
    """
    found = gate_file.read(path)
    if not isinstance(found, GateFile) or not found.finished:
        return found
    text = path.read_text(encoding="utf-8")
    raw: dict[str, Any] = loads(text)
    gate = state.parse(path, raw)
    if gate is None or gate.inputs is None or "digests" not in raw:
        raise GateFileError(f"{path}: it does not hold what it was judged from: gate again")
    digests = state.digests(json.loads(text), path.parent)
    if moved := sorted(dict(digests.items() ^ raw["digests"].items())):
        raise GateFileError(f"{path}: {moved[0]} changed since the verdict: gate again")
    sides = {"adopted": found.adopted, "candidate": found.candidate}
    try:
        judged = judge(gate, {name: side.record for name, side in sides.items()})
        again = loads(redacted(json.dumps(judged.to_json())))
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # a field of another type
        why = one_line(f"{type(error).__name__}: {error}", 80)
        raise GateFileError(f"{path}: it cannot be judged again ({why}): gate again") from None
    if other := [name for name in DECIDED if _without_repro(raw.get(name)) != _without_repro(again[name])]:
        raise GateFileError(
            f"{path}: its evidence gives {again['decision']} with {len(again['findings'])} findings, the file says"
            f" {raw['decision']} with {len(raw['findings'])} (other {', '.join(other)}): gate again"
        )
    return found


def _without_repro(value: Any) -> Any:
    """Return findings without the commands that reproduce them; other values unchanged."""
    if isinstance(value, dict):
        return {name: x for name, x in value.items() if name != "repro"}
    return [_without_repro(x) for x in value] if isinstance(value, list) else value


def sides_of(gate: Gate, records: Mapping[str, Record | None]) -> dict[str, Side]:
    """Return the sides for the verdict. A side that was not run because of the other one has an empty record."""
    found = {}
    for name, side in gate.sides.items():
        spared = not (side.measured or side.failure)
        record = Record({"lane": gate.config.lane}, ()) if spared else records.get(name)
        found[name] = Side(side.name, record, side.failure, side.canaries or {}, command=side.command)
    return found


def _with_interpreter(gate: Gate, f: Finding, root: Path, options: Sequence[str]) -> Finding:
    """Put the side's interpreter into the repro: plain `pytest` depends on the shell's environment."""
    if not f.repro.startswith("pytest "):
        return f
    python = gate.sides["adopted" if f.adopted and not f.candidate else "candidate"].python
    return replace(f, repro=by_hand(Path(python), root, f.repro, options))


def _with_faults(sides: Mapping[str, Side], sessions: Sessions) -> tuple[dict[str, Side], list[Problem]]:
    """Add the problems of the timed processes to both sides' records; return also those of the adopted side alone."""
    candidate = _with_problems(sides["candidate"], sessions.problems("candidate"))
    of_candidate = {p.test for p in candidate.record.problems} if candidate.record else set()
    faults = sessions.problems("adopted")
    shared = [p for p in faults if p.test in of_candidate]
    adopted = _with_problems(sides["adopted"], shared)
    return {**sides, "adopted": adopted, "candidate": candidate}, [p for p in faults if p not in shared]


def _with_problems(side: Side, problems: Sequence[Problem]) -> Side:
    if side.record is None or not problems:
        return side
    return replace(side, record=replace(side.record, problems=(*side.record.problems, *problems)))


def _gaps(gate: Gate, candidate: Record | None) -> list[Finding]:
    """Report what leaves the whole gate without an answer: an edited tree, equal sides, a part of the lane."""
    assert gate.inputs
    found = []
    if gate.inputs.tree:  # the two sides may have run different tests
        head = f"the work tree changed while the gate measured ({'; '.join(gate.inputs.tree)})"
        found.append(Finding(Decision.UNKNOWN, "INFRA", "", head, repro=gate.command))
    if not gate.config.base and gate.sides["adopted"].equals(gate.sides["candidate"]):
        head = "the sides are equal: the same packages in the same versions"
        found.append(Finding(Decision.UNKNOWN, "EQUAL", "", head))
    if gate.config.fast and candidate is not None:
        part = part_of_lane(candidate.provenance.get("part"))
        head = "; ".join(filter(None, (f"{FAST} measures no time", part)))
        whole = shlex.join(word for word in shlex.split(gate.command) if word != FAST)
        found.append(Finding(Decision.UNKNOWN, "PART", "", head, repro=whole))
    return found


def _unequal_losses(lane: str, sessions: Sessions) -> list[Finding]:
    """Return findings on tests whose timed readings the candidate loses: too noisy to use, or their processes died."""
    found = []
    for test, p in sessions.unequal_losses().items():
        adopted, candidate = (
            f"{sessions.lost_processes[test][side]} timed processes without a reading in {sessions.started} sessions"
            for side in ("adopted", "candidate")
        )
        rows = tuple(row for row, node in sessions.tests.items() if node == test)
        head = f"timed processes without a reading, more than the adopted build's (adjusted p {p:.2g})"
        repro = investigate(lane, test)
        found.append(Finding(Decision.HOLD, "LOST", "", head, rows, (adopted,), (candidate,), repro))
    return found


def _anchor_gaps(gate: Gate, root: Path, options: Sequence[str]) -> list[Finding]:
    """Report an anchor that could not be paired, and rows without a reading against it, whose drift is not measured.

    If the budget ended the sessions, this is shown only: --resume continues them.
    options: of pytest, in the line that reproduces a fault.
    """
    side, sessions = gate.sides.get("anchor"), gate.drifted
    if side and side.failure:
        head = one_line(side.failure)
        seen = (f"{side.name}: {head}",)
        return [Finding(Decision.UNKNOWN, "INFRA", "", head, adopted=seen, repro=side.command)]
    found: list[Finding] = []
    open_rows = sessions.open_rows() if sessions else []
    for row, test in sessions.tests.items() if sessions else ():
        assert sessions
        count = len(sessions.log_ratios[row])
        if count == sessions.limit:
            continue
        decision, label, name = Decision.ADOPT, NOT_RUN, "candidate"
        head = "no drift is measured: the budget is spent"
        if row not in open_rows:
            other, why = _why_lost(sessions, test)
            decision, label, name = Decision.UNKNOWN, "INFRA", "anchor" if other == "adopted" else "candidate"
            head = f"{name}: {one_line(why)}"
        seen = (f"{row}: {count} of {sessions.limit} sessions with the anchor",)
        repro = by_hand(Path(gate.sides[name].python), root, investigate(gate.config.lane, test), options)
        found.append(Finding(decision, label, "", head, rows=(row,), candidate=seen, repro=repro))
    return found


def _why_lost(sessions: Sessions, test: str) -> tuple[str, str]:
    """Return the side, "adopted" or "candidate", whose times of a test were lost, and why."""
    for side, faults in sessions.faults.items():
        if test in faults:
            return side, faults[test]
    side, _, why = sessions.lost.partition(": ")
    return side or "adopted", why or "no process gave a time"
