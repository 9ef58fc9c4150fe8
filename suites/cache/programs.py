"""One process of the cache checks: compiles variants of one small program and prints the cache counts as JSON.

`python -m suites.cache.programs DEVICE VARIANT...` with TORCHINDUCTOR_CACHE_DIR set; the parent compares processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suites.support.child import print_result

CODE = (".so", ".cubin")
GIVEN = dict(os.environ)  # before torch is imported
# Defaults of two options, which the variants change; the order of the keys must not matter.
OPTIONS = {"epilogue_fusion": True, "max_fusion_size": 64}

Changes = dict[str, Any]
VARIANTS: dict[str, Changes] = {
    "same": {},
    "without_aotautograd": {"forget": "aotautograd"},
    "without_fxgraph": {"forget": "fxgraph"},
    "options_reordered": {"options": dict(reversed(OPTIONS.items()))},
    "source": {"constant": 3.0},
    "shape": {"size": 8},
    "dtype": {"dtype": "float64"},
    "inductor_option": {"options": OPTIONS | {"max_fusion_size": 8}},
    "torch_version": {"version": "2.0.0"},
}


def compiled_code() -> dict[str, int]:
    """Return every compiled object in the cache directory with its write time, which changes if it is built again."""
    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    found = (path for path in directory.rglob("*") if path.suffix in CODE)
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in found}


def run(
    device: str,
    constant: float = 2.0,
    size: int = 16,
    dtype: str = "float32",
    options: Changes = OPTIONS,
    version: str = "",
    forget: str = "",
) -> dict[str, Any]:
    """Compile forward and backward of sin(constant x) for x (size,size) and return the counts of each cache layer.

    version: what torch reports as its version. forget: a layer whose directory is deleted first.
    """
    import torch

    from bumpgate.plugin.instruments import DynamoWatch, cache_counts
    from suites.support.instruments import autotune_count

    if version:
        torch.__version__ = version
    if forget:
        shutil.rmtree(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / forget)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * constant).sin()

    with DynamoWatch() as watch:
        x = torch.ones(size, size, dtype=getattr(torch, dtype), device=device, requires_grad=True)
        torch.compile(forward, options=dict(options))(x).sum().backward()
        counted = {"counts": asdict(cache_counts()), "autotunes": autotune_count()}
    # Variables that importing torch and compiling have changed in this process's environment.
    exported = {name: value for name, value in os.environ.items() if GIVEN.get(name) != value}
    return {**counted, "frames": watch.report.frames_ok, "code": compiled_code(), "exported": exported}


def main(device: str, *variants: str) -> dict[str, Any]:
    """Return variant -> cache counts, compiled one after the other in this process."""
    return {name: run(device, **VARIANTS[name]) for name in variants}


if __name__ == "__main__":
    # `python -m` needed the repository root to find this file; from here on any directory works.
    os.chdir(os.environ.get("BUMPGATE_ELSEWHERE", "."))
    try:
        print_result(main(*sys.argv[1:]))
    except Exception as error:
        raise SystemExit(" ".join(str(error).splitlines()[:2])) from None
