"""The environment variables that a lane's processes have before torch is imported."""

from __future__ import annotations

import os
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
