"""The environment variables that a lane's processes need before torch is imported."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bumpgate.process import cxx

# The variables that a lane's processes start with. Fresh ones must not inherit what later tests, and torch while
# compiling in them, leave in os.environ: torch 2.11.0+cu130 sets Triton's ptxas to its own once it compiles, and every
# key of Triton's cache and of Inductor's templates includes the ptxas (pytorch#163988).
ENVIRONMENT = dict(os.environ)


def prepare_environment(lane: str | None, workers: bool) -> None:
    """Set what torch must find at import, in this process, in workers (if the tests run in them) and in their children.

    Compiled code is kept between runs, so that the second run is warm, in a directory of our own: Inductor's default
    one holds entries of programs that did not count bytes. On CPU, use one thread and no wider vectors than AVX2: both
    change the generated code, and so every exact row, from one machine to the next.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "bumpgate" / "inductor"))
    if lane == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        if workers:
            # One for each core: the processes that Inductor would start to compile import torch again, for nothing.
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        _keep_kernels(os.environ.setdefault("BUMPGATE_OBJECTS", str(home / "bumpgate" / "objects")))
    if lane in ("h200", "h200x2"):  # every worker has its own threads and compiler processes
        os.environ.setdefault("TRITON_CACHE_DIR", str(home / "bumpgate" / "triton"))
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        # Otherwise each process that compiles for the CPU builds a probe of each of its vector units, and before torch
        # 2.13 imports torch again to load it (pytorch#183515): half of the time of a first compile.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        # At import, under deterministic algorithms, mamba-ssm would keep one configuration per kernel: a slow peer.
        os.environ.setdefault("MAMBA_DETERMINISTIC", "0")
    if lane == "v6e":
        os.environ.setdefault(
            "PJRT_DEVICE", "CPU"
        )  # a TPU is used only on request, and a substitute is labelled as one
    ENVIRONMENT.update(os.environ)  # pytest loads the conftest files of a named folder before


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
