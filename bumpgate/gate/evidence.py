"""The verdict of a gate as a function of its evidence, and gates that are read: each is judged again from its files.

gate.json holds what the verdict depends on (its options, sides, sessions and `Inputs`) and the digests of that and of
both records. A file whose findings do not follow from its evidence is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bumpgate.core import gate_file
from bumpgate.core.errors import loads
from bumpgate.core.findings import Decision, Finding, group
from bumpgate.core.gate_file import GateFile, GateFileError
from bumpgate.core.rows import Problem, Record
from bumpgate.core.text import redacted
from bumpgate.gate import state
from bumpgate.gate.drift import apply_to_times, find_drifts
from bumpgate.gate.sequential import summarise
from bumpgate.gate.state import Gate
from bumpgate.gate.timed import Sessions
from bumpgate.gate.verdict import (
    Side,
    added_up,
    anchor_gap,
    equal_sides,
    judge_gate,
    left_out,
    of_adopted_alone,
    tree_gap,
    unequal_losses,
)
from bumpgate.process.runner import by_hand

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
    lost = unequal_losses(lane, gate.paired) if gate.paired else []
    gaps = [
        *anchor_gap(gate, root, options),
        *tree_gap(gate, inputs.tree),
        *equal_sides(gate),
        *left_out(gate, records.get("candidate")),
    ]
    crept_up = added_up(lane, verdict.findings, records.get("candidate"), inputs.oldest)
    findings = group([*verdict.findings, *crept_up, *of_adopted_alone(lane, alone), *lost, *gaps])
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
    judged = judge(gate, {name: side.record for name, side in sides.items()})
    again = loads(redacted(json.dumps(judged.to_json())))
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
