"""Notes below the findings of a gate: different variants of torch, and what its lane runs noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bumpgate.core import gate_file
from bumpgate.gate import state
from bumpgate.gate.command import _show, other_variant
from tests.support.gating import Machine


@pytest.mark.parametrize(
    ("adopted", "candidate", "noted"),
    [
        ("2.13.0+cpu", "2.14.1+cu130", True),
        ("2.13.0+cpu", "2.14.1+cpu", False),
        ("2.13.0+cpu", "2.14.1", False),
        ("2.14.0a0+git21fec65", "2.14.0a0+git8d1e2f0", False),
        ("2.13.0+cu130.with.a", "2.14.1+cu130", False),
    ],
)
def test_different_variants_of_torch_are_noted(
    adopted: str, candidate: str, noted: bool, machine: Machine, out: Path
) -> None:
    machine.sides["adopted"].torch, machine.sides["candidate"].torch = adopted, candidate
    machine.gate(out)
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    note = other_variant(found)
    assert bool(note) == noted
    if noted:
        assert note.startswith(f"note: {adopted} and {candidate} are different variants: ")
        assert note.endswith('--index URL, --candidate "torch==X+cpu"')


def test_margin_that_matches_no_row_is_shown_by_the_gate(
    machine: Machine, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.gate(out)
    path = out / "adopted.json"
    raw = json.loads(path.read_text())
    raw["provenance"]["margins"] = ["no row of this run matches 'a/*'"]
    path.write_text(json.dumps(raw))
    found = gate_file.read(out / state.NAME)
    assert isinstance(found, gate_file.GateFile)
    _show(found, out, again=False)
    assert "margin: no row of this run matches 'a/*'\n" in capsys.readouterr().out
