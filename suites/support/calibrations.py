"""What a run measures of its host, by row id `calibration/<bound>/<metric>`; each takes less than two seconds.

The times of a baseline are judged on hosts whose calibrations agree (bumpgate/core/hosts.py). Those of `machine` bound
no time: they tell a reader what the host was.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from bumpgate.core.lanes import Lane
from bumpgate.process.gpu_shares import own_cores

LOOP = "sum(k * k % 7 for k in range(400_000))"
# About 2000 lines of Python to compile: functions with branches, calls and subscripts.
SOURCE = "".join(
    f"def f{n}(a, b=[{n}]):\n    for k in a:\n        b[0] += k if k % {n + 2} else f{n}(b)\n"
    for n in range(700)
)
REPEATED = 5
LAUNCHES = 2000
COPIED_TO_DEVICE = 256 << 20


class Measure(NamedTuple):
    """One property. at_most: what no such host can reach, so that a clock which reads more is broken."""

    unit: str
    function: Callable[[], float]
    work: str
    at_most: float | None = None


def measures(lane: Lane) -> dict[str, Measure]:
    """Return the properties that a lane measures in the process of its timed tests.

    A lane of several GPUs measures them in its ranks (suites/distributed/scaling.py).
    """
    if lane.count > 1 or lane.device not in ("cpu", "cuda"):
        return {}
    return {**OF_HOST, **(OF_GPU if lane.device == "cuda" else {})}


def of_process() -> dict[str, float]:
    """Return what bounds the first step of a process that compiles, measured in this process."""
    bounds = ("calibration/host/", "calibration/compiler/")
    return {id: measure.function() for id, measure in OF_HOST.items() if id.startswith(bounds)}


def fastest(function: Callable[[], object]) -> float:
    """Return the CPU milliseconds of the fastest of a few calls."""
    times = []
    for _ in range(REPEATED):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def _loop() -> float:
    code = compile(LOOP, "loop", "eval")
    return fastest(lambda: eval(code))


def _compiled() -> float:
    return fastest(lambda: compile(SOURCE, "source", "exec"))


def _all_cores() -> float:
    """Return how many times the work of one process all cores do at once."""
    timed = f"import time; s = time.perf_counter(); {LOOP}; print(time.perf_counter() - s)"

    def seconds(processes: int) -> list[float]:
        started = [
            subprocess.Popen([sys.executable, "-SEc", timed], stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        return [float(process.communicate()[0]) for process in started]

    alone = min(seconds(1)[0] for _ in range(3))
    return sum(alone / each for each in seconds(len(own_cores())))


def _free_cores() -> float:
    cores = own_cores()
    used = psutil.cpu_percent(0.3, percpu=True)
    return sum(1 - used[core] / 100 for core in cores)


def _copied() -> float:
    from suites.support.gpu_timing import copy_rate

    return copy_rate()


def _multiplied() -> float:
    from suites.support.gpu_timing import matmul_rate

    return matmul_rate()


def _launch() -> float:
    import torch

    x, rounds = torch.zeros(1, device="cuda"), []
    for _ in range(REPEATED + 1):  # the first loads the kernel
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / LAUNCHES)
    return 1e6 * statistics.median(rounds[1:])


def _host_to_device() -> float:
    import torch

    source = torch.empty(COPIED_TO_DEVICE, dtype=torch.uint8, pin_memory=True)
    target, rounds = torch.empty_like(source, device="cuda"), []
    for _ in range(REPEATED + 1):
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        rounds.append(time.perf_counter() - start)
    return COPIED_TO_DEVICE / statistics.median(rounds[1:])


def _clock() -> float:
    import torch

    from suites.support.gpu_state import read
    from suites.support.gpu_timing import MATMUL_SIZE

    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):  # about 0.3 s, in which the clock is read
        a @ a
    clock = read().sm
    torch.cuda.synchronize()
    return clock


OF_HOST = {
    "calibration/host/loop_cpu_milliseconds": Measure("ms", _loop, LOOP),
    "calibration/compiler/python_cpu_milliseconds": Measure("ms", _compiled, "2100 lines of Python"),
    "calibration/machine/cores_at_once": Measure("cores", _all_cores, "the loop on all cores over one"),
    "calibration/machine/free_cores": Measure("cores", _free_cores, "in 0.3 s before the first timed test"),
}
# Impossible on an H200: memory above the datasheet's rate, or more than 132 SMs of 4096 dense bf16 FLOP per clock at
# 1980 MHz. A clock that measures more is broken.
OF_GPU = {
    "calibration/memory/copy_bytes_per_second": Measure(
        "bytes/s", _copied, "1 GiB, read and written", 4.8e12
    ),
    "calibration/matmul/matmul_flops": Measure(
        "FLOP/s", _multiplied, "bf16, 8192 cubed, random numbers", 132 * 4096 * 1.98e9
    ),
    "calibration/launch/launch_microseconds": Measure("us", _launch, f"{LAUNCHES} additions to one number"),
    "calibration/machine/host_to_device_bytes_per_second": Measure(
        "bytes/s", _host_to_device, "256 MiB, pinned"
    ),
    "calibration/machine/clock_megahertz": Measure("MHz", _clock, "of the SMs, under matrix products"),
}
