"""One process of the first-call check: `python -m suites.kernels.first_call CASE`, on the caches of its environment.

The last line of output is JSON: seconds of the op's first forward and backward, compiling and choosing of
configurations included, and how many kernels they compiled. The peer is called after it, so that its code is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from suites.kernels.peer_tuning import tuned_case
from suites.support.gpu_timing import forward_and_backward


def main(name: str) -> dict[str, float]:
    """Of the case at the batch size that is timed. Raises KeyError on an unknown case."""
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


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
