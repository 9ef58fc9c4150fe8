"""Mark of tests that plant a fault themselves and pass only if the check rejects it.

`tests/support/mutants.py` plants its faults in a copy of the tree and reads the row that turns red. Some faults need no
copy: a wrong environment variable, a corrupt file, a collective that one rank never enters. Their tests carry this
mark, so that the mutant matrix counts them with the mutants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest


def planted(rule: str, fault: str) -> pytest.MarkDecorator:
    """rule: the contract row that must detect it ("C17"). fault: a short description of the fault."""
    return pytest.mark.planted(rule, fault)


@pytest.fixture(autouse=True)
def planted_faults(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the faults that a test plants, for the mutant matrix. A conftest.py imports this fixture."""
    for mark in request.node.iter_markers("planted"):
        report_fault(record_property, *mark.args)


def report_fault(
    record_property: Callable[[str, object], None],
    rule: str,
    fault: str,
    row: str = "",
    red: Sequence[str] = (),
) -> None:
    """Record a fault in the report for tools/matrix.py. row: what must turn red; red: the other red rows."""
    entry = {"rule": rule, "fault": fault, "row": row, "red": list(red)}
    record_property("planted", json.dumps(entry, sort_keys=True))
