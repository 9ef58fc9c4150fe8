"""Gaps in the evidence of a gate that no row shows: each leaves the decision UNKNOWN, unless something else holds."""

from __future__ import annotations

import shlex

from bumpgate.core.findings import Decision, Finding
from bumpgate.core.rows import Record, one_line
from bumpgate.gate.result import FAST, Gate
from bumpgate.run.binding import Binding
from bumpgate.table import part_of_lane


def anchor_gap(gate: Gate) -> list[Finding]:
    """Report a requested anchor that could not be paired."""
    side = gate.sides.get("anchor")
    if side is None or not side.failure:
        return []
    head = one_line(side.failure)
    return [Finding(Decision.UNKNOWN, "INFRA", "", head, good=(f"{side.name}: {head}",), repro=side.command)]


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
