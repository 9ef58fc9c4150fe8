"""The environment variables that a lane's processes need before torch is imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from bumpgate.core.lanes import Lane
from bumpgate.process import cxx

# The variables that a lane's processes start with. Fresh ones must not inherit what later tests, and torch while
# compiling in them, leave in os.environ: torch 2.11.0+cu130 sets Triton's ptxas to its own once it compiles, and every
# key of Triton's cache and of Inductor's templates includes the ptxas (pytorch#163988).
ENVIRONMENT = dict(os.environ)
# The store of compiled C++ kernels of a lane that has one; "" disables it.
OBJECTS = "BUMPGATE_OBJECTS"


def prepare_environment(lane: Lane | None, workers: bool) -> None:
    """Set what torch must find at import, in this process, in workers (if the tests run in them) and in their children.

    Compiled code is kept between runs, so that the second run is warm, in a directory of our own: Inductor's default
    one holds entries of programs that did not count bytes. What else a lane needs is in its lane.toml.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bumpgate"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    variables = lane.variables if lane else {}
    os.environ.update(_values(variables.get("always", {}), cache))
    for when in ("default", "workers") if workers else ("default",):
        for name, value in _values(variables.get(when, {}), cache).items():
            os.environ.setdefault(name, value)
    if OBJECTS in variables.get("default", {}):
        _keep_kernels(os.environ[OBJECTS])
    ENVIRONMENT.update(os.environ)  # pytest loads the conftest files of a named folder before


def _values(variables: Mapping[str, str], cache: Path) -> dict[str, str]:
    return {name: value.replace("{cache}", str(cache)) for name, value in variables.items()}


def compiler() -> dict[str, str]:
    """Return the env_var that names the C++ compiler itself, for a process whose compile time is measured."""
    return {"CXX": os.environ.get("BUMPGATE_CXX") or os.environ.get("CXX") or "g++"}


def _keep_kernels(store: str) -> None:
    """Compile each C++ kernel once, with `bumpgate.process.cxx`; $BUMPGATE_OBJECTS names its folder, "" disables it."""
    named = os.environ.get("CXX") or "g++"
    if not store or "BUMPGATE_CXX" in os.environ or not shutil.which(named):
        return
    cxx.prune(Path(store))
    os.environ["BUMPGATE_CXX"] = named
    os.environ["CXX"] = str(cxx.program(Path(store), named))
