"""Peers that are not installed: their rows are NOT RUN with the reason, and no other row is lost.

A kernel wheel is built for one torch version, so a candidate's environment may lack it. Under --gate a missing peer is
red, unless the gate has found that no wheel fits the candidate and lists it in VARIABLE, or the adopted set of the lane
has given the wheel up (`without` of its lane.toml).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.core.baseline import find_root
from bumpgate.core.lanes import Lane, load
from bumpgate.plugin.rows import RowRecorder

# Set by the gate: JSON mapping of distribution name to the reason why this environment has no such wheel.
VARIABLE = "BUMPGATE_ABSENT"


def absent(packages: Iterable[str]) -> list[str]:
    """Return the packages, by import name, that are not installed. A broken one counts as installed.

    A folder without __init__.py is what an uninstalled package left behind: Python finds it, as a namespace.
    """
    found = {package: importlib.util.find_spec(package) for package in packages}
    return sorted(package for package, spec in found.items() if spec is None or spec.origin is None)


def installed(distribution: str) -> bool:
    """Return whether a distribution is installed; "" is nothing to install."""
    return not distribution or bool(next(iter(metadata.distributions(name=distribution)), None))


def given_up(lane: str) -> dict[str, str]:
    """Return the kernel wheels that the adopted set of a lane has given up, with the reason."""
    declared = load(find_root(Path.cwd())).get(lane)
    names = map(canonicalize_name, declared.without if declared else ())
    return {name: f"lane {lane} has given {name} up (lanes/{lane}/lane.toml)" for name in names}


def not_run(row: RowRecorder, lane: Lane, rows: Iterable[str], packages: Iterable[str]) -> str:
    """List rows as NOT RUN because `packages` are not installed; return the reason. No packages: does nothing."""
    missing = absent(packages)
    if not missing:
        return ""
    known = given_up(lane.name) | {
        canonicalize_name(name): why for name, why in json.loads(os.environ.get(VARIABLE) or "{}").items()
    }
    why = [known.get(canonicalize_name(package), f"{package} is not installed") for package in missing]
    reason = "; ".join(dict.fromkeys(why))
    row.not_run(rows, reason, excused=all(canonicalize_name(package) in known for package in missing))
    return reason
