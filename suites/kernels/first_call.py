"""One process of the first-call check: `python -m suites.kernels.first_call CASE`, on the caches of its environment.

The last line of output is JSON: seconds of the op's first forward and backward, including compilation and autotuning,
and how many kernels they compiled. The peer is called after it, so that its code is cached, too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from bumpgate.core.rows import write_atomic
from suites.kernels.peer_tuning import tuned_case
from suites.support.child import print_result
from suites.support.gpu_timing import forward_and_backward

LIST = "__grp__"  # prefix of Triton's file that lists an entry's files


def main(name: str) -> dict[str, float]:
    """Run the case at the timed batch size. Raises KeyError on an unknown case."""
    case = tuned_case(name, B=4)
    torch.cuda.synchronize()
    started = time.perf_counter()
    forward_and_backward(case.op, case.inputs)[1]()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    kernels = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    if case.peer:
        forward_and_backward(case.peer, case.inputs)[1]()
    return {"seconds": seconds, "kernels": kernels}


def keep(made: Path, cache: Path) -> None:
    """Copy the entries of one cache, of Triton or Inductor, into another that other processes use meanwhile.

    An existing file is left alone, because it may be mapped. Triton's list of an entry's files has their absolute
    paths, and is written after them.
    """
    files = [path for path in made.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda path: path.name.startswith(LIST)):
        place = cache / file.relative_to(made)
        if place.exists():
            continue
        data = file.read_bytes()
        if file.name.startswith(LIST):
            data = data.replace(os.fsencode(made), os.fsencode(cache))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, data)


if __name__ == "__main__":
    print_result(main(sys.argv[1]))
