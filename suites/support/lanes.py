"""The lanes of this repository (lanes/), as its tests name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core import lanes as declared
from bumpgate.core.lanes import Lane
from bumpgate.plugin.devices import PJRT_CPU, V6E

__all__ = ["LANES", "PJRT_CPU", "V6E", "V6E_AOT", "Lane", "lanes", "needs_tpu"]

LANES = declared.load(Path(__file__).parents[2])
# Lanes of more GPUs than a test needs to compare two ranks.
MANY_GPUS = [lane.name for lane in LANES.values() if lane.count > 2]
# Device of v6e-lane rows that were measured with the TPU compiler but without a TPU, next to PJRT_CPU and V6E.
V6E_AOT = "v6e-aot"


def lanes(*names: str) -> pytest.MarkDecorator:
    """Parametrize the fixture `lane` over the named lanes and their heirs, each parameter with its lane's marker.

    The scope is the session, so that module-scoped fixtures may request `lane` too. Raises ValueError on an unknown
    lane.
    """
    unknown = [name for name in names if name not in LANES]
    if unknown or not names:
        raise ValueError(f"unknown lane {unknown or ''}; lanes: {', '.join(LANES)}")
    heirs = [lane.name for lane in LANES.values() if lane.inherits in names and lane.name not in names]
    params = [pytest.param(LANES[n], id=n, marks=getattr(pytest.mark, n)) for n in (*names, *heirs)]
    return pytest.mark.parametrize("lane", params, scope="session")


def needs_tpu(reason: str, *rows: str) -> pytest.MarkDecorator:
    """Mark rows that only a v6e can show. Elsewhere the test is skipped and they are listed as NOT RUN."""
    return pytest.mark.needs_tpu(reason, rows)
