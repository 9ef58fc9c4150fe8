"""Every Triton kernel compiled for an H200, on a machine without one: `pytest -m cpu suites/kernels/codegen`.

A tier of the cpu lane that is collected on request: if the command line names this folder or something in it, or
BUMPGATE_TIERS names it, as in a gate of triton. A plain lane run leaves it out, whether or not its torch includes
triton. It needs triton, and TRITON_INTERPRET=1 must not be set, because that replaces the compiler by the interpreter.

A row has one reviewed value for each version of triton, measured in the environments codegen-triton36, -triton37 and
-triton39 of tox.ini. Under another version the code is compared with the nearest reviewed version's.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from bumpgate.core import kernel_code
from bumpgate.core.baseline import Baseline, load
from bumpgate.plugin.provenance import versions

FOLDER = Path(__file__).parent
COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"

collect_ignore_glob = [] if COMPILES else ["test_*.py"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Return True if the tier was not requested."""
    return None if requested(config) else True


def requested(config: pytest.Config) -> bool:
    """Return whether this run measures the tier."""
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    named = any(path.is_relative_to(FOLDER) for path in paths)
    return named or FOLDER.name in os.environ.get("BUMPGATE_TIERS", "").split(",")


def pytest_configure() -> None:
    """Keep compiled code between runs, in a directory of our own."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / "bumpgate" / "triton"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not COMPILES or not requested(config):
        return []
    return [reviewed_line(load(config.rootpath / "baselines" / "cpu.json", "cpu"), versions()["triton"])]


def reviewed_line(baseline: Baseline, triton: str | None) -> str:
    """Describe the reviewed code that this run is compared with."""
    reviewed = sorted({v for row in baseline.rows.values() for v in row.values}, key=kernel_code.numbers)
    if triton in reviewed or not reviewed:
        return f"codegen: triton {triton}, reviewed: {', '.join(reviewed) or 'no version'}"
    other = kernel_code.nearest(triton or "", reviewed)
    return f"codegen: triton {triton} is not reviewed; its code is compared with that of triton {other}"
