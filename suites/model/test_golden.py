"""Every kind of block and every preset still gives its golden results, in fp64.

Only fixtures/make.py writes them.
"""

from __future__ import annotations

import pytest
import torch

from model import preset
from model.hybrid import BLOCKS
from suites.model.golden import differences, results, set_by_formula, stored, subjects
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted


@lanes("cpu", "h200")
def test_blocks_and_presets_equal_their_golden_results(lane: Lane, row) -> None:
    golden, faults, agreeing, compared = stored(), [], 0, 0
    for subject in subjects():
        found = results(subject, lane.device)
        lines = differences(found, golden)
        agreeing, compared = agreeing + (not lines), compared + sum(t.numel() for t in found.values())
        faults += lines
    row.count(
        f"model/golden-{lane.name}/subjects", agreeing, expected=len(subjects()), rule="C35", seen=compared,
        evidence=faults,
    )  # fmt: skip


@lanes("cpu")
@planted("C35", "a weight off by a millionth")
@pytest.mark.parametrize("kind", BLOCKS)
def test_weight_off_by_a_millionth_is_detected(
    lane: Lane, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks every parameter that has a gradient; the others are the indexer's, whose choice has none."""
    before, blind = results(kind), []
    for name, _ in BLOCKS[kind](preset("nam56r", "narrow")).named_parameters():

        def moved(model: torch.nn.Module, name: str = name) -> torch.nn.Module:
            with torch.no_grad():
                set_by_formula(model).get_parameter(name).mul_(1 + 1e-6)
            return model

        monkeypatch.setattr("suites.model.golden.set_by_formula", moved)
        if not differences(results(kind), before):
            blind.append(name)
        monkeypatch.undo()
    assert all(name.startswith("index_") for name in blind), blind
