"""Every Triton kernel compiled for an H200, on a machine without one: `pytest -m cpu suites/kernels/codegen`.

Collected where a compiler is: with triton installed, and not under TRITON_INTERPRET=1, which puts the interpreter in
its place. Rows carry the version of triton, so that the environments codegen-triton36, -triton37 and -triton39 of
tox.ini stand side by side in one baseline. Upstream's kernels are compiled where BUMPGATE_UPSTREAM names a folder that
holds the unpacked wheel of mamba-ssm.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
UPSTREAM = os.environ.get("BUMPGATE_UPSTREAM")
HAS_UPSTREAM = bool(UPSTREAM) and (Path(UPSTREAM) / "mamba_ssm").is_dir()

collect_ignore = ["test_upstream.py"] if COMPILES and not HAS_UPSTREAM else []
collect_ignore_glob = [] if COMPILES else ["test_*.py"]


def pytest_configure() -> None:
    """What is compiled outlives a run, in a place of our own."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / "bumpgate" / "triton"))


def pytest_report_header() -> str | None:
    if HAS_UPSTREAM or not COMPILES:
        return None
    why = f"{UPSTREAM} holds no mamba_ssm" if UPSTREAM else "BUMPGATE_UPSTREAM names no unpacked wheel"
    return f"codegen: upstream's kernels are not collected: {why}"
