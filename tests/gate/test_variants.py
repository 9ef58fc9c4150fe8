"""The note of a gate whose sides run different variants of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core import gate_file
from bumpgate.gate import result
from bumpgate.gate.command import other_variant
from tests.support.gating import Machine


@pytest.mark.parametrize(
    ("good", "bad", "noted"),
    [
        ("2.13.0+cpu", "2.14.1+cu130", True),
        ("2.13.0+cpu", "2.14.1+cpu", False),
        ("2.13.0+cpu", "2.14.1", False),
        ("2.14.0a0+git21fec65", "2.14.0a0+git8d1e2f0", False),
        ("2.13.0+cu130.with.a", "2.14.1+cu130", False),
    ],
)
def test_different_variants_of_torch_are_noted(
    good: str, bad: str, noted: bool, machine: Machine, out: Path
) -> None:
    machine.sides["good"].torch, machine.sides["bad"].torch = good, bad
    machine.gate(out)
    found = gate_file.read(out / result.NAME)
    assert isinstance(found, gate_file.GateFile)
    note = other_variant(found)
    assert bool(note) == noted
    if noted:
        assert note.startswith(f"note: {good} and {bad} are different variants: ")
        assert note.endswith('--index URL, --candidate "torch==X+cpu"')
