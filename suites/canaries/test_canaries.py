"""Self-checks of the instruments: each canary's known count, as a row of every lane and every session."""

from __future__ import annotations

import pytest

from suites.support.canaries import CANARIES, prove
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", CANARIES)
def test_canary(lane: Lane, name: str, row, canaries) -> None:
    canaries(name)
    reason = prove([name])[name]
    row(
        f"canaries/{name}/agrees",
        not reason,
        unit="bool",
        witness=1,
        rule="I1",
        expected=True,
        evidence=[reason or CANARIES[name].__doc__.strip()],
        instruments=[name],
    )
