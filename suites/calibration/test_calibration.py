"""The host of this run, next to the host of the reviewed times. Rule C37."""

from __future__ import annotations

from bumpgate.plugin.rows import CALIBRATIONS
from suites.support.calibrations import measures
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
def test_host(lane: Lane, row, request, exclusive_machine) -> None:
    """The fixture `row` has measured it before the first test that runs alone; a session of a gate measures nothing."""
    known = request.config.stash.get(CALIBRATIONS, {})
    for id, measure in measures(lane).items():
        value = known[id] if id in known else measure.function()
        row.calibration(
            id, value, measure.unit, at_most=measure.at_most, rule="C37", seen=1, evidence=[measure.work]
        )
