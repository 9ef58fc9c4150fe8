"""Self-checks of the instruments: each canary's known count, as a row of every lane and every session."""

from __future__ import annotations

import pytest

from suites.support.canaries import CANARIES
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", CANARIES)
def test_canary(lane: Lane, name: str, row, canaries) -> None:
    reason = canaries(name)[name]
    evidence = [reason or CANARIES[name].__doc__.strip()]
    row.bound(
        f"canaries/{name}/agrees", not reason, "bool", expected=True, rule="I1", seen=1, evidence=evidence
    )
