"""The class of this host: timed rows of different classes are not comparable (rule C37). Read from files only."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

# The reference of a run, the peers that it may lack, its partner in a paired session, its share of the machine, that
# its times are not used, the rows of a paired session, and the folder of the project under test. bumpgate sets them for
# the lane runs that it starts, and PARENT to its process id, so that the same variables in a user's shell are rejected.
PROJECT = "BUMPGATE_PROJECT"
OWN_VARIABLES = (
    "BUMPGATE_LOCK",
    "BUMPGATE_ABSENT",
    "BUMPGATE_DUET",
    "BUMPGATE_SHARE",
    "BUMPGATE_UNTIMED",
    "BUMPGATE_SESSION",
    PROJECT,
)
PARENT = "BUMPGATE_PARENT"
# Where a run writes its progress, for the bumpgate that shows it.
PROGRESS = "BUMPGATE_PROGRESS"
GPUS = Path("/proc/driver/nvidia/gpus")
# Maximum memory of a worker of the CPU lane, while it compiles the 52-layer model.
WORKER_GIB = 4


def read_or_empty(path: Path | str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the CPU model as the kernel names it."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cores(process: int = 0) -> int | None:
    """Return the number of cores that a process may use, by default this one."""
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def host_cores() -> int | None:
    """Return the number of cores that this host's class states.

    It is the number that the bumpgate process which started this run may use; without one, that this process may use.
    """
    try:
        return cores(int(os.environ.get(PARENT, "0")))
    except (OSError, ValueError, OverflowError):  # that process has ended
        return cores()


def available_gib(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the available memory in GiB; at most the limit of this container."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", read_or_empty(proc / "meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    limit = read_or_empty(cgroup / "memory.max").strip()
    return min(free, int(limit) if limit.isdigit() else free) / 2**30


def cpu_workers(sides: int = 1) -> int:
    """Return the workers of a CPU lane if `sides` lanes run at once: a core and WORKER_GIB each, at least one."""
    return max(1, min(cores() or 1, int(available_gib() / WORKER_GIB)) // sides)


def gpu_models() -> list[str]:
    """Return the models of the GPUs that the NVIDIA driver lists, in bus order."""
    return [model for model in _of_gpus("Model") if model]


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that the NVIDIA driver lists, in bus order; "" for one without."""
    return _of_gpus("GPU UUID")


def _of_gpus(field: str) -> list[str]:
    texts = [read_or_empty(path) for path in sorted(GPUS.glob("*/information"))]
    found = (re.search(rf"^{field}:\s*(.+)$", text, re.MULTILINE) for text in texts)
    return [match[1].strip() if match else "" for match in found]


def host_class() -> str:
    """Return processor, cores and GPUs in one line."""
    return ", ".join([cpu_model(), f"{cores()} cores", *gpu_models()])
