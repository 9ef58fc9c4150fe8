"""A fault that a test plants itself and passes only if the check refuses it.

`suites/self/mutants.py` plants its faults in a copy of the tree and reads the row they turn red; some faults need no
copy: a wrong environment variable, a corrupt file, a collective that one rank never enters. Their tests carry this
mark, so that the mutant matrix counts them beside the mutants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest


def planted(rule: str, fault: str) -> pytest.MarkDecorator:
    """rule: the contract row that must kill it ("C17"). fault: what is planted, in a few words."""
    return pytest.mark.planted(rule, fault)


def tell(
    record_property: Callable[[str, object], None],
    rule: str,
    fault: str,
    row: str = "",
    red: Sequence[str] = (),
) -> None:
    """Puts a fault on the test's report, for suites/self/matrix.py. row: what must turn red; red: what else did."""
    told = {"rule": rule, "fault": fault, "row": row, "red": list(red)}
    record_property("planted", json.dumps(told, sort_keys=True))
