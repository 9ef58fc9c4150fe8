"""A gate.json with given findings, as `bumpgate adopt` reads it."""

from __future__ import annotations

from collections.abc import Mapping

from bumpgate.core.findings import Decision, Finding
from bumpgate.core.gate_file import GateFile, GateSide, Paired


def gate_of(*findings: Finding, timed: Mapping[str, Paired] = {}) -> GateFile:
    """Return a gate with these findings; timed: row id -> outcome of its sessions."""
    sides = [GateSide(name, None) for name in ("torch 2.11.0", "torch 2.15.0")]
    return GateFile("h200", Decision.HOLD, "", 0.0, "", *sides, findings, timed, {}, ())
