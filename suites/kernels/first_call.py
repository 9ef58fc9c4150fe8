"""One process of the first-call check: `python -m suites.kernels.first_call CASE`, on the caches of its environment.

The last line of output is JSON: CPU seconds of the op's first forward and backward, including compilation and
autotuning, how many kernels they compiled, and what this process read of its host before them. The peer is called after
it, so that its code is cached, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from bumpgate.core.rows import write_atomic
from suites.kernels.peer_tuning import tuned_case
from suites.support.calibrations import OF_HOST
from suites.support.child import print_result
from suites.support.gpu_timing import forward_and_backward
from suites.support.instruments import cpu_seconds

LIST = "__grp__"  # prefix of Triton's file that lists an entry's files


COMPILER = "calibration/compiler/python_cpu_milliseconds"


def main(name: str) -> dict[str, Any]:
    """Run the case at the timed batch size. Raises KeyError on an unknown case."""
    case = tuned_case(name, B=4)
    torch.cuda.synchronize()
    host = {COMPILER: OF_HOST[COMPILER].function()}
    started = cpu_seconds()
    forward_and_backward(case.op, case.inputs)[1]()
    torch.cuda.synchronize()
    seconds = cpu_seconds() - started
    kernels = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    if case.peer:
        forward_and_backward(case.peer, case.inputs)[1]()
    return {"cpu_seconds": seconds, "kernels": kernels, "host": host}


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
