"""One process of the check of the profiler: kernels of a GPU that a trace holds after one of the CPU alone.

`python -m suites.release.profiled_twice FIRST`, FIRST `cpu` or `gpu`: the activities of the first profile. The last
line of output is JSON: the number of kernels in the second one. A process of its own, because the first profile of a
process decides for all later ones.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from suites.support.child import print_result


def main(first: str) -> dict[str, int]:
    x = torch.ones(64, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA if first == "gpu" else ProfilerActivity.CPU]):
        x.sin()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        x.sin()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return {"kernels": sum(event.device_type == on_device for event in trace.events())}


if __name__ == "__main__":
    print_result(main(sys.argv[1]))
