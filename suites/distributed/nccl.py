"""Programs of a rank that only NCCL has: what its groups are set to, and its watchdog with and without the contract."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.dist.process_group import new_group
from launch.dist.ranks import Ranks
from suites.support.instruments import group_class, group_timeout, present_activities

WATCHDOG = "pt_nccl_watchdg"  # the name that torch gives to the thread, of at most 15 characters
ALL_REDUCE = ("allreduce", "all_reduce")  # names of a trace: ProcessGroupNCCL's and ProcessGroupNCCL2's
COLLECTIVES = {"default": 3, "further": 2}  # group -> how many collectives each rank runs in it

# Stops threads of another process, which is what the heartbeat monitor looks for: a watchdog that a call into CUDA or
# NCCL keeps. The threads go on when this process ends, at the latest with its parent.
STOP = """
import ctypes, os, signal, sys, time
SEIZE, INTERRUPT, ALL_THREADS, DEATH_SIGNAL = 0x4206, 0x4207, 0x40000000, 1
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
for thread in map(int, sys.argv[1:]):
    for request in (SEIZE, INTERRUPT):
        if libc.ptrace(request, thread, 0, 0):
            raise SystemExit(f"cannot stop thread {thread}: {os.strerror(ctypes.get_errno())}")
    os.waitpid(thread, ALL_THREADS)
print("stopped", flush=True)
time.sleep(600)
"""


def killed_by(log: str) -> str:
    """Return the line of a rank's standard error in which NCCL's watchdog or its monitor names the reason, or ""."""
    reasons = ("Watchdog caught collective operation timeout", "watchdog got stuck for")
    lines = Path(log).read_text(errors="replace").splitlines()
    return next((line for line in lines if any(reason in line for reason in reasons)), "")


def group_facts(ranks: Ranks) -> dict[str, Any]:
    """Run COLLECTIVES in two groups -> timeouts in seconds, sequence numbers, the group's device and class."""
    groups = {"default": dist.group.WORLD, "further": new_group(ranks.contract)}

    def numbers() -> dict[str, int]:
        return {name: group._get_sequence_number_for_group() for name, group in groups.items()}

    before, total = numbers(), _reduced(ranks, groups)
    return {
        "timeouts": {name: group_timeout(group, ranks.device.type) for name, group in groups.items()},
        "before": before,
        "after": numbers(),
        "sum": float(total[0]),
        "bound": str(groups["default"].bound_device_id),
        "class": group_class(dist.group.WORLD, ranks.device.type),
    }


def _reduced(ranks: Ranks, groups: dict[str, Any]) -> torch.Tensor:
    total = torch.ones(4, device=ranks.device)
    for name, count in COLLECTIVES.items():
        for _ in range(count):
            dist.all_reduce(total, group=groups[name])
    return total


def traced_numbers(ranks: Ranks) -> dict[str, list[int | None]]:
    """Run COLLECTIVES under the profiler -> group -> the number that the trace gives each of them, None without one."""
    groups = {"default": dist.group.WORLD, "further": new_group(ranks.contract)}
    with torch.profiler.profile(activities=present_activities()) as profile:
        _reduced(ranks, groups)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    calls = [e for e in events if e.get("name") == "record_param_comms"]
    calls = [e["args"] for e in sorted(calls, key=lambda e: e["ts"])]
    reduced = [call for call in calls if call.get("Collective name") in ALL_REDUCE]
    return {
        name: [call.get("Seq") for call in reduced if call.get("Process Group Name") == group.group_name]
        for name, group in groups.items()
    }


def late_rank(ranks: Ranks, seconds: float) -> dict[str, Any]:
    """Sum over the ranks, of which the last one comes `seconds` later, as one that compiles longer."""
    if ranks.rank == ranks.world - 1:
        time.sleep(seconds)
    total = torch.ones(1, device=ranks.device)
    dist.all_reduce(total)
    return {"sum": float(total)}


def stopped_watchdog(ranks: Ranks, seconds: float) -> dict[str, Any]:
    """Stop the threads of NCCL's watchdog for `seconds`; returns if the process is alive after it."""
    total = torch.ones(1, device=ranks.device)
    dist.all_reduce(total)
    reached = float(total)
    names = {path.parent.name: path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    threads = [thread for thread, name in names.items() if name == WATCHDOG]
    with subprocess.Popen(
        [sys.executable, "-c", STOP, *threads], stdout=subprocess.PIPE, text=True
    ) as stopper:
        assert stopper.stdout is not None
        if stopper.stdout.readline().strip() != "stopped":
            raise RuntimeError("the threads could not be stopped: ptrace is not permitted")
        time.sleep(seconds)
        stopper.kill()
    dist.all_reduce(total)
    return {"threads": len(threads), "sum": float(total), "before": reached}
