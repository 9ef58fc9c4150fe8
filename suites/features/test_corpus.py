"""The corpus of torch's regressions: each case is a defect row, present exactly in the releases that have it.

A gate from a good release to a bad one holds because of it.
"""

from __future__ import annotations

import pytest

from bumpgate.plugin.instruments import reset_dynamo
from suites.features.corpus import CASES, Case
from suites.support.lanes import Lane, lanes


@lanes("cpu")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_regression(lane: Lane, row, case: Case) -> None:
    """Run the case's program: its signature occurs in the releases that have the regression, and only in those."""
    reset_dynamo()
    found = case.signature()
    row.defect(
        case.row, bool(found), known_in=case.known_in, reason=f"{case.title} ({case.link})", rule="R1",
        seen=1, evidence=found, program=case.find,
    )  # fmt: skip
