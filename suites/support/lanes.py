"""The lanes of this repository (pyproject.toml), as its tests name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate import lanes as declared
from bumpgate.lanes import Lane
from bumpgate.plugin.devices import PJRT_CPU, V6E

__all__ = ["LANES", "PJRT_CPU", "V6E", "V6E_AOT", "Lane", "lanes", "needs_tpu"]

LANES = declared.load(Path(__file__).parents[2])
# What a row of the v6e lane was measured on other than PJRT_CPU and V6E: the compiler of a TPU, without a TPU.
V6E_AOT = "v6e-aot"


def lanes(*names: str) -> pytest.MarkDecorator:
    """Parametrises the fixture `lane` over the named lanes, each parameter carrying its lane's marker.

    The scope is the session's, so that a module's fixture may ask for `lane` too. Raises ValueError on a name
    that is no lane.
    """
    unknown = [name for name in names if name not in LANES]
    if unknown or not names:
        raise ValueError(f"unknown lane {unknown or ''}; lanes: {', '.join(LANES)}")
    params = [pytest.param(LANES[name], id=name, marks=getattr(pytest.mark, name)) for name in names]
    return pytest.mark.parametrize("lane", params, scope="session")


def needs_tpu(reason: str, *rows: str) -> pytest.MarkDecorator:
    """Only a v6e can show these rows. Elsewhere the test is not run and they are listed so, neither red nor green."""
    return pytest.mark.needs_tpu(reason, rows)
