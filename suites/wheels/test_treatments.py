"""Real Mamba and attention kernels under Dynamo, in each form in which a user can pass them (rules C15, C16)."""

from __future__ import annotations

import pytest

from suites.support.absent import not_run
from suites.support.child import run_json
from suites.support.gpu_memory import claimed
from suites.support.lanes import Lane, lanes
from suites.wheels.treatments import FORMS, SITES

METRICS = ("raised", "graph_breaks", "unique_graphs", "recompiles_over_70_steps", "gradient_difference")
# Of bf16's rounding in another order; a gradient that is lost differs by 1.
LARGEST_DIFFERENCE = 0.1
SECONDS = 400


@lanes("h200")
@pytest.mark.long(60)
@pytest.mark.parametrize("form", FORMS)
def test_wheel_under_dynamo(lane: Lane, form: str, row, canaries) -> None:
    """A form that does not compile has the row `raised` alone, with the error."""
    canaries("graphs", "graph_breaks", "recompiles")
    cases = {package: f"wheels/dynamo-{package}-{form}" for package in SITES}
    rows = [f"{case}/{metric}" for case in cases.values() for metric in METRICS]
    if reason := not_run(row, lane, rows, SITES):
        pytest.skip(f"not run: {reason}")
    with claimed(8):
        found = run_json("suites.wheels.treatments", "counts", form, environment={}, timeout=SECONDS)
    for package, case in cases.items():
        seen = found[package]
        if "raised" in seen:
            row.count(f"{case}/raised", [seen["raised"]], rule="C15", seen=1)
            continue
        about = {"rule": "C15", "seen": seen["calls"], "evidence": seen["evidence"]}
        opaque = 0 if form == "custom_op" else None
        row.count(f"{case}/raised", 0, **about)
        row.count(f"{case}/graph_breaks", seen["breaks"], expected=opaque, **about)
        row.count(
            f"{case}/unique_graphs", seen["graphs"], expected=1 if form == "custom_op" else None, **about
        )
        row.count(f"{case}/recompiles_over_70_steps", seen["recompiles"], expected=opaque, **about)
        row.bound(
            f"{case}/gradient_difference", seen["difference"], "ratio", at_most=LARGEST_DIFFERENCE, **about
        )
