"""Each injected fault turns its named row red, with a message that names the rule and the location."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.baseline import load
from suites.support.planted import report_fault
from tests.support.mutants import MUTANTS, RED, Mutant, message
from tests.support.tree import ROOT, copy_tree, run_lane

pytestmark = pytest.mark.long(60)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path, record_property) -> None:
    root = copy_tree(tmp_path / "tree")
    mutant.plant(root)
    run = run_lane(root, mutant.test)
    judged = run.rows.get(mutant.row)
    assert judged, f"{mutant.name}: row {mutant.row} was not measured\n{run.output[-3000:]}"
    also_red = sorted(row for row in run.rows if row != mutant.row and run.verdict(row) in RED)
    report_fault(record_property, mutant.words[0], mutant.name.replace("_", " "), mutant.row, also_red)
    assert judged["verdict"] in RED, f"{mutant.name} survived: {judged['verdict']}: {message(judged)}"
    assert run.code == 1
    absent = mutant.unnamed(judged)
    assert not absent, f"{mutant.name}: the message does not name {absent}: {message(judged)}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_row_of_a_mutant_is_reviewed(mutant: Mutant) -> None:
    """The lane is green without the mutant only if it measures this row in this test."""
    reviewed = load(ROOT / "baselines" / "cpu.json", "cpu").rows[mutant.row]
    assert reviewed.test == mutant.test
