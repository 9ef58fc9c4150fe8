"""One process of the full-size restart check: the first step of a model under a policy, and the counts of each cache.

`python -m suites.throughput.restart nam52 regional` with TORCHINDUCTOR_CACHE_DIR set; the last line of output is JSON.
The ops' own kernels use the environment's Triton cache, Inductor's the subfolder "triton" of its own cache. With a
third argument, "first", its claim of GPU memory has priority over all others. The parent compares a process on an empty
directory with one on the directory it leaves, or with another policy's.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def main(name: str, policy: str, claim: str = "") -> dict[str, object]:
    """Return seconds of the first step and, before it, of the ops' own kernels; cache counts and contents.

    cpu_seconds: of both together, with the compile workers.
    loss: of another batch. code: files by their time. host: calibrations of what bounds the seconds.
    """
    from bumpgate.plugin.instruments import cache_counts
    from suites.cache.programs import compiled_code
    from suites.cache.restart import tree_cpu_seconds
    from suites.support.calibrations import of_process
    from suites.support.gpu_memory import claimed
    from suites.support.instruments import autotune_count
    from suites.throughput.full_size import GIB, STACK_GIB, full_size, load_kernels

    before = tree_cpu_seconds()
    with claimed(STACK_GIB):
        kernels_seconds = load_kernels(name)
    used = tree_cpu_seconds() - before
    os.environ["TRITON_CACHE_DIR"] = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "triton")
    with claimed(GIB[name], first=claim == "first"), full_size(name, policy) as hybrid:
        before = tree_cpu_seconds()
        seconds = hybrid.first_step()
        used += tree_cpu_seconds() - before
        loss = hybrid.loss()
        report = hybrid.watch.refresh()
        return {
            "kernels_seconds": kernels_seconds,
            "seconds": seconds,
            "cpu_seconds": used,
            "loss": loss,
            "counts": asdict(cache_counts()),
            "autotunes": autotune_count(),
            "graphs": report.unique_graphs,
            "frames": report.frames_ok,
            "code": compiled_code(),
            "host": of_process(),
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4])))
