"""Self-checks of the XLA instruments: each canary's known count, as a row of every session. 1 s."""

from __future__ import annotations

import pytest

from suites.support.canaries import prove
from suites.support.lanes import Lane, lanes
from suites.xla.canaries import XLA_CANARIES


@lanes("v6e")
@pytest.mark.parametrize("name", XLA_CANARIES)
def test_canary(lane: Lane, name: str, row, canaries) -> None:
    canaries(name)
    reason = prove([name], XLA_CANARIES)[name]
    row(
        f"canaries/{name}/agrees",
        not reason,
        unit="bool",
        witness=1,
        rule="I1",
        expected=True,
        evidence=[reason or XLA_CANARIES[name].__doc__.strip()],
        instruments=[name],
    )
