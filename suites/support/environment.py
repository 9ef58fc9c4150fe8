"""The environment that a lane's processes are given before torch is imported, and what is wrong with the given one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def prepare_environment(lane: str | None) -> None:
    """What torch must find at import, here, in workers and in their children.

    Compiled code outlives a run, so that the second one is warm, in a place of our own: Inductor's default holds
    entries of programs that did not count bytes. On CPU one thread, and no wider vectors than AVX2: both change the
    generated code, and with it every exact row, from one machine to the next.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "bumpgate" / "inductor"))
    if lane == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    if lane == "h200":  # every worker has threads and compiler processes of its own
        os.environ.setdefault("TRITON_CACHE_DIR", str(home / "bumpgate" / "triton"))
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        # Or each process that compiles anything for the CPU would build a probe of each of its vector units, and before
        # torch 2.13 import torch once more to load it (pytorch#183515): half of a first compile's time.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        # At import, under deterministic algorithms, mamba-ssm would keep one configuration of each kernel: a slow peer.
        os.environ.setdefault("MAMBA_DETERMINISTIC", "0")
    if lane == "v6e":
        os.environ.setdefault(
            "PJRT_DEVICE", "CPU"
        )  # a TPU is for who asks for it, and a stand-in says that it is one


def cache_fault() -> str | None:
    """Why a cache directory is of no use, in one line; it is made where it is missing.

    A real write: mode bits say nothing to root.
    """
    faults = map(_directory_fault, ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    return next((fault for fault in faults if fault), None)


def _directory_fault(variable: str) -> str | None:
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=name) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{variable}={name}: {error.strerror}; unset it or name a writable directory"
    return None
