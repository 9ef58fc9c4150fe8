"""Gaps in the evidence of a gate that no row shows: each leaves the decision UNKNOWN, unless something else holds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from bumpgate.core.baseline import investigate
from bumpgate.core.errors import one_line
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record
from bumpgate.gate.result import FAST, Gate
from bumpgate.gate.timed import Sessions
from bumpgate.gate.verdict import NOT_RUN
from bumpgate.process.runner import by_hand
from bumpgate.process.tree_digest import Binding
from bumpgate.table import part_of_lane


def anchor_gap(gate: Gate, root: Path, options: Sequence[str]) -> list[Finding]:
    """Report a requested anchor that could not be paired, and rows without a reading against it.

    options: of pytest, in the line that reproduces a fault.
    """
    side = gate.sides.get("anchor")
    if side and side.failure:
        head = one_line(side.failure)
        return [
            Finding(
                Decision.UNKNOWN, "INFRA", "", head, adopted=(f"{side.name}: {head}",), repro=side.command
            )
        ]
    return _without_reading(gate, gate.drifted, root, options) if gate.drifted else []


def _without_reading(gate: Gate, sessions: Sessions, root: Path, options: Sequence[str]) -> list[Finding]:
    """Report the rows that lack sessions with the anchor, once for each cause: no drift of them is measured.

    If the budget ended the sessions, this is shown only: --resume continues them.
    """
    open_rows, found = sessions.open_rows(), list[Finding]()
    for row, test in sessions.tests.items():
        count = len(sessions.log_ratios[row])
        if count == sessions.limit:
            continue
        if row in open_rows:
            decision, label, side = Decision.ADOPT, NOT_RUN, "candidate"
            head = "no drift is measured: the budget is spent"
        else:
            decision, label, (side, why) = Decision.UNKNOWN, "INFRA", _why_lost(sessions, test)
            head = f"{'anchor' if side == 'adopted' else 'candidate'}: {one_line(why)}"
        seen = (f"{row}: {count} of {sessions.limit} sessions with the anchor",)
        python = Path(gate.sides["anchor" if side == "adopted" else "candidate"].python)
        repro = by_hand(python, root, investigate(gate.config.lane, test), options)
        found.append(Finding(decision, label, "", head, (row,), (), seen, repro))
    return found


def _why_lost(sessions: Sessions, test: str) -> tuple[str, str]:
    """Return the side, "adopted" or "candidate", whose times of a test were lost, and why."""
    for side, faults in sessions.faults.items():
        if test in faults:
            return side, faults[test]
    side, _, why = sessions.lost.partition(": ")
    return side or "adopted", why or "no process gave a time"


def tree_gap(gate: Gate, now: Binding | None) -> list[Finding]:
    """Report a work tree that was edited during the gate: the two sides may have run different tests."""
    differences = gate.binding.differences(now) if gate.binding and now else []
    if not differences:
        return []
    head = f"the work tree changed while the gate measured ({'; '.join(differences)})"
    return [Finding(Decision.UNKNOWN, "INFRA", "", head, repro=gate.command)]


def left_out(gate: Gate, candidate: Record | None) -> list[Finding]:
    """Report what a fast gate does not measure."""
    if not gate.config.fast or candidate is None:
        return []
    head = [f"{FAST} measures no time", part_of_lane(candidate.provenance.get("part"))]
    whole = shlex.join(word for word in shlex.split(gate.command) if word != FAST)
    return [Finding(Decision.UNKNOWN, "PART", "", "; ".join(filter(None, head)), repro=whole)]
