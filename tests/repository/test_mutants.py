"""Each injected fault turns its named row red, with a message that names the rule and the location."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.baseline import load
from suites.support.planted import report_fault
from tests.support.mutants import MUTANTS, Mutant
from tests.support.tree import ROOT, copy_tree, run_lane

pytestmark = pytest.mark.long(60)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path, record_property) -> None:
    root = copy_tree(tmp_path / "tree")
    mutant.plant(root)
    run = run_lane(root, mutant.test, environment={"TMPDIR": str(tmp_path)})  # with the lock of the machine
    assert mutant.row in run.rows, f"row {mutant.row} was not measured\n{run.output[-3000:]}"
    name = mutant.name.replace("_", " ")
    report_fault(record_property, mutant.words[0], name, mutant.row, mutant.also_red(run))
    assert not mutant.survived(run)
    assert run.code == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_row_of_a_mutant_is_reviewed(mutant: Mutant) -> None:
    """The lane is green without the mutant only if it measures this row in this test."""
    reviewed = load(ROOT / "baselines" / "cpu.json", "cpu").rows[mutant.row]
    assert reviewed.test == mutant.test
