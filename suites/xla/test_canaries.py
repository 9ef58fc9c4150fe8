"""Self-checks of the XLA instruments: each canary's known count, as a row of every session. 1 s."""

from __future__ import annotations

import pytest

from suites.support.lanes import lanes
from suites.xla.canaries import XLA_CANARIES

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane")]


@pytest.mark.parametrize("name", XLA_CANARIES)
def test_canary(name: str, row, canaries) -> None:
    reason = canaries(name)[name]
    evidence = [reason or XLA_CANARIES[name].__doc__.strip()]
    row.bound(
        f"canaries/{name}/agrees", not reason, "bool", expected=True, rule="I1", seen=1, evidence=evidence
    )
