"""What the kernels of the ops do with a GPU: Nsight Compute's counters at the model's shapes.

    python -m tools.kernel_counters [CASE ...] [--out tools/kernel_counters.json]

Runs each timed case of suites/ops forward, and forward and backward, once in a process under `ncu`, and
writes the counters of each kernel as JSON, which tools.op_table shows. Without a case: those whose mark is missed. The
file keeps its other cases, each with the build that it was measured on. The GPU's clocks stay as they are. Exit codes:
0 written; 2 usage error, or an unusable --out; 3 no GPU, or `ncu` is missing or failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bumpgate.plugin.provenance import driver, versions
from bumpgate.process.host import gpu_models
from suites.support.tables import line, publish

CASES = (
    "attention-P128",
    "attention-P128-softcap30",
    "mamba3_siso-N64-G8",
    "mamba3_siso-N128-G1",
    "dsa_indexer-K256-attention",
    "dsa_indexer-K256-loss",
    "grouped_gemm-E64-K6-3584x896",
)
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
    "SchedulerStats",
    "Occupancy",
    "LaunchStats",
    "MemoryWorkloadAnalysis",
)
# Name in the result -> counter. Shares are percent of the peak, of the cycles in which an SM was active if it is one of
# an SM's. warps: of an SM, on average.
COUNTERS = {
    "nanoseconds": "gpu__time_duration.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
}
# Cycles that a warp waits between two instructions, by reason.
WAIT = re.compile(r"smsp__average_warps_issue_stalled_(?!selected)(\w+?)_per_issue_active\.ratio")
RANGE = re.compile(r"domain>:([^:\"]+):")
WAYS = ("forward", "both")
# Of a case's time: kernels below it are left out.
LEAST_SHARE = 0.02
FILE = Path(__file__).with_suffix(".json")
NO_GPU = "the NVIDIA driver lists no GPU: run this on a machine with one"
HEAD = (
    "op, shape", "kernel", "ms", "tensor cores", "issue slots", "special functions", "L1", "L2", "DRAM",
    "warps an SM", "registers", "shared, KiB", "a warp waits for",
)  # fmt: skip
NOTES = """
Nsight Compute's counters of one forward and backward pass, of each kernel that takes {share:.0%} of it or more.

Busy shares are in percent. A warp waits so many cycles between two instructions for: `barrier` the other warps of its
program, `long_scoreboard` loads from L1 or beyond, `short_scoreboard` shared memory, `mio_throttle` the queue of
special functions and shared memory, `wait` a fixed latency, `not_selected` a scheduler that issues for another warp,
`dispatch_stall` the dispatcher, `math_pipe_throttle` a busy pipe, `drain` its last stores. To measure again:
`python -m tools.kernel_counters --out tools/kernel_counters.json`.
"""
Kernel = dict[str, Any]


def parse(text: str) -> dict[str, list[Kernel]]:
    """Return "CASE/WAY" -> its kernels, in the order they ran, from the output of `ncu --csv --page raw --nvtx`.

    A kernel of another thread, as those of a backward pass, is in no range; it belongs to the last one that began.
    Raises ValueError if there is no table.
    """
    table = [row for row in text.splitlines() if row.startswith('"')]
    if not table or not table[0].startswith('"ID"'):
        raise ValueError("no table in the output of ncu")
    found: dict[str, list[Kernel]] = {}
    name = "?"
    for cells in csv.DictReader(table):
        if not cells["ID"]:  # the line of units
            continue
        named = RANGE.search(next(cells[key] for key in cells if "Push/Pop_Range" in key))
        name = named[1] if named else name
        found.setdefault(name, []).append(_kernel(cells))
    return found


def longest(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that take LEAST_SHARE of all their time or more."""
    total = math.fsum(kernel["nanoseconds"] for kernel in kernels)
    return [kernel for kernel in kernels if kernel["nanoseconds"] >= LEAST_SHARE * total]


def section(result: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown section on the result of `main`, with a table for each machine and build."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for name, case in result.items():
        title = f"`{name}`"
        for kernel in case["both"]:
            shares = [f"{kernel[key]:.0f}" for key in ("tensor", "issue", "xu", "l1", "l2", "dram", "warps")]
            resources = [f"{kernel['registers']:.0f}", f"{kernel['shared_bytes'] / 1024:.0f}"]
            waits = ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in kernel["waits"].items())
            milliseconds = f"{kernel['nanoseconds'] / 1e6:.3f}"
            cells = (title, f"`{kernel['kernel']}`", milliseconds, *shares, *resources, waits)
            tables.setdefault(described(case["made_with"]), []).append(cells)
            title = ""
    text = ["## What the kernels wait for", *NOTES.format(share=LEAST_SHARE).splitlines()]
    for machine, table in tables.items():
        text += ["", f"{machine}:", "", *(line(cells) for cells in (HEAD, ("---",) * len(HEAD), *table))]
    return text


def unusable(cases: Iterable[str]) -> str:
    """Return why these cases cannot be measured here, in one line; "" if they can."""
    from suites.ops import timed_cases

    if unknown := [name for name in cases if name not in timed_cases()]:
        return f"unknown case {unknown[0]!r}; cases: {', '.join(timed_cases())}"
    return "" if gpu_models() else NO_GPU


def described(made: Mapping[str, Any]) -> str:
    """Return the machine and build of a result in one line."""
    return f"{made['device']}, driver {made['driver']}, torch {made['torch']}, triton {made['triton']}"


def _kernel(cells: Mapping[str, str]) -> Kernel:
    kernel: Kernel = {"kernel": re.sub(r"^void |[<(].*", "", cells["Kernel Name"])}
    kernel |= {name: round(_number(cells[counter]), 2) for name, counter in COUNTERS.items()}
    waits = {match[1]: _number(cells[key]) for key in cells if (match := WAIT.fullmatch(key))}
    most = sorted(waits, key=lambda reason: -waits[reason])[:3]
    return kernel | {"waits": {reason: round(waits[reason], 2) for reason in most}}


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def profile(cases: Iterable[str]) -> None:
    """Run each case once as the profiled program, after a call that compiles it."""
    import torch

    from suites.ops import timed_cases
    from suites.support.gpu_timing import forward_and_backward

    for name in cases:
        torch.manual_seed(0)
        case = timed_cases()[name].make(4)
        calls = dict(zip(WAYS, forward_and_backward(case.op, case.inputs)))
        for call in calls.values():
            call()
        for way, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_push(f"{name}/{way}")
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            torch.cuda.nvtx.range_pop()
        del case, calls, call
        torch.cuda.empty_cache()


def made_with() -> dict[str, str | None]:
    """Return the GPU, its driver and the versions of the running build."""
    return {"device": next(iter(gpu_models()), None), "driver": driver(), **versions()}


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernel_counters", description=__doc__.splitlines()[0]
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a key of suites.ops.timed_cases()")
    parser.add_argument("--out", type=Path, help="writes the JSON there instead of printing it")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    cases = given.cases or CASES
    if given.profiled:
        profile(cases)
        return 0
    if refusal := unusable(cases):
        print(refusal, file=sys.stderr)
        return 3 if refusal == NO_GPU else 2
    try:
        kept = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    except (OSError, ValueError) as error:
        print(f"--out {given.out}: {error}; name another file, or remove it", file=sys.stderr)
        return 2
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not on PATH: install NVIDIA Nsight Compute, or add its folder", file=sys.stderr)
        return 3
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--nvtx"]
    options += ["--profile-from-start", "off", *(word for name in SECTIONS for word in ("--section", name))]
    program = [sys.executable, "-m", "tools.kernel_counters", "--profiled", *cases]
    ran = subprocess.run([ncu, *options, *program], stdout=subprocess.PIPE, text=True)
    try:
        found = parse(ran.stdout)
    except ValueError as error:
        print(f"{error} (exit code {ran.returncode}):\n{ran.stdout[-2000:]}", file=sys.stderr)
        return 3
    for key in found:
        kept[key.partition("/")[0]] = {"made_with": made_with()}
    for key, kernels in found.items():
        name, _, way = key.partition("/")
        kept[name][way] = longest(kernels)
    return publish(json.dumps(kept, indent=1) + "\n", given.out)


if __name__ == "__main__":
    sys.exit(main())
