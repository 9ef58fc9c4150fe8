"""Shares of a machine: some of its GPUs and cores, so that lanes and sessions can run at the same time.

A process that bumpgate starts on a share sees its GPUs in CUDA_VISIBLE_DEVICES and keeps to its cores. A test that
needs the machine to itself then waits only for the tests of its share.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from bumpgate.core.errors import BumpgateError
from bumpgate.process.host import gpu_models, gpu_uuids

VARIABLE, UNTIMED, SESSION = "BUMPGATE_SHARE", "BUMPGATE_UNTIMED", "BUMPGATE_SESSION"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALL = "all"
# An entry of CUDA_VISIBLE_DEVICES: an index or a UUID.
GPU = re.compile(r"\d+|(GPU|MIG)-\S+")


@dataclass(frozen=True)
class GpuShare:
    """GPUs as in CUDA_VISIBLE_DEVICES (an index or a UUID each), and numbers of cores; no core means any."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...] = ()

    def variables(self) -> dict[str, str]:
        """Return the environment variables that start a lane on this share."""
        return {VISIBLE: ",".join(self.gpus), VARIABLE: json.dumps(self.cores)}


def divide(gpus: Sequence[str], count: int, cores: Sequence[int]) -> list[GpuShare]:
    """Return shares of `count` GPUs each, with equal numbers of neighbouring cores; GPUs that are left over are unused.

    With fewer cores than shares, each share may use all of them.
    """
    groups = [tuple(gpus[i : i + count]) for i in range(0, len(gpus) - count + 1, count)]
    size = len(cores) // len(groups) if groups else 0
    return [GpuShare(group, tuple(cores[i * size : (i + 1) * size])) for i, group in enumerate(groups)]


def merged(shares: Sequence[GpuShare]) -> GpuShare:
    cores = sorted(core for share in shares for core in share.cores)
    return GpuShare(tuple(gpu for share in shares for gpu in share.gpus), tuple(cores))


def parts(shares: Sequence[GpuShare], number: int) -> list[list[GpuShare]]:
    """Return `number` groups of equally many neighbouring shares, for lanes that run at the same time.

    Shares that are left over are unused: each lane is measured on an equal machine. Raises ValueError if there are
    fewer shares than lanes.
    """
    if not 1 <= number <= len(shares):
        raise ValueError(f"{len(shares)} shares cannot be given to {number} lanes")
    size = len(shares) // number
    return [list(shares[i * size : (i + 1) * size]) for i in range(number)]


def requested(text: str, count: int, present: int) -> list[str]:
    """Return the GPUs that `--gpus` names: a list such as 0,1,2,3, or `all`. The result is empty for "".

    count: GPUs that the lane needs. present: number of GPUs that the driver lists, 0 if unknown. Raises BumpgateError.
    """
    if not text:
        return []
    seen = listed()
    if seen == []:
        raise BumpgateError(
            f"--gpus {text}: {VISIBLE}={os.environ[VISIBLE]!r} hides all GPUs: unset it, or list GPUs"
        )
    if text == ALL:
        gpus = seen or [str(i) for i in range(present)]
        if not gpus:
            raise BumpgateError("--gpus all: the NVIDIA driver lists no GPU: name them, such as --gpus 0,1")
    else:
        gpus = [gpu.strip() for gpu in text.split(",")]
    if "" in gpus or len(lock_names(gpus)) < len(gpus):
        raise BumpgateError(f"--gpus {text}: name each GPU once, such as --gpus 0,1,2,3, or --gpus all")
    known = seen or ([str(i) for i in range(present)] if present else gpus)
    if unknown := [gpu for gpu in gpus if gpu not in known and (seen or gpu.isdecimal())]:
        raise BumpgateError(f"--gpus {text}: no GPU {unknown[0]} here (found {', '.join(known)})")
    if len(gpus) < count:
        raise BumpgateError(f"--gpus {text}: {len(gpus)} GPU, and the lane needs {count}")
    return gpus


def first_gpu() -> str:
    """Return the first visible GPU: an index or a UUID, as in CUDA_VISIBLE_DEVICES."""
    return os.environ.get(VISIBLE, "").split(",")[0].strip() or "0"


def used_gpus(count: int) -> list[str]:
    """Return the GPUs that a run without `--gpus` may use. count: the number of GPUs that the lane needs.

    These are the GPUs in CUDA_VISIBLE_DEVICES, over which the workers are spread. Without that variable a lane of one
    GPU runs on the first GPU, and a lane of several GPUs may use all that the driver lists.
    """
    return listed() or [str(i) for i in range(max(count, len(gpu_models())) if count > 1 else 1)]


def lock_names(gpus: Iterable[str]) -> list[str]:
    """Return the names of the locks of GPUs, in order, so that two processes never wait for each other.

    A UUID, or its beginning, becomes the index in the driver's list if all GPUs are of one model: CUDA may number GPUs
    of several models in another order.
    """
    uuids = gpu_uuids() if len(set(gpu_models())) == 1 else []
    names = set()
    for gpu in gpus:
        found = [str(i) for i, uuid in enumerate(uuids) if gpu.startswith("GPU-") and uuid.startswith(gpu)]
        names.add(found[0] if len(found) == 1 else gpu)
    return sorted(names)


def own_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; empty if they cannot be queried."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def untimed() -> bool:
    """Return whether this run only fills compile caches: its times are not used, so timed tests need not run alone."""
    return UNTIMED in os.environ


def unused(*rows: str) -> bool:
    """Return whether these rows of this run are not used: it fills compile caches, or is a session of other rows.

    A test may then skip the measurements that only these rows need.
    """
    return untimed() or (SESSION in os.environ and not {*rows} & _paired(os.environ[SESSION]))


@cache
def _paired(path: str) -> frozenset[str]:
    return frozenset(json.loads(Path(path).read_text(encoding="utf-8")))


def keep_to_cores() -> None:
    """Move this process to the cores of its share, if it has one.

    To be called before torch is imported, which sizes its thread pools by the available cores.
    """
    cores = json.loads(os.environ.get(VARIABLE, "[]"))
    if cores:
        os.sched_setaffinity(0, cores)


def listed() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, None if it is unset. As for CUDA, an invalid entry ends it."""
    if VISIBLE not in os.environ:
        return None
    return [*takewhile(GPU.fullmatch, (gpu.strip() for gpu in os.environ[VISIBLE].split(",")))]


def visible(count: int) -> list[GpuShare]:
    """Return the groups of `count` GPUs each that CUDA_VISIBLE_DEVICES lists; empty if it is unset."""
    return divide(listed() or (), count, ())


@dataclass(frozen=True)
class Place:
    """The GPUs of one process and all GPUs of its lane run, as names of their locks in order."""

    own: Sequence[str]
    gpus: Sequence[str]


def take_place(worker: int | None, count: int) -> Place:
    """Give a worker one of the run's groups of `count` GPUs, in turn; all GPUs of the run if it has no two groups.

    worker: counted from 0; None for the process that runs pytest itself, whose GPUs stay as they are.
    """
    groups = visible(count)
    if len(groups) < 2:
        used = lock_names(used_gpus(count))
        return Place(used, used)
    own = groups[(worker or 0) % len(groups)]
    if worker is not None:
        os.environ[VISIBLE] = ",".join(own.gpus)
    return Place(lock_names(own.gpus), lock_names(merged(groups).gpus))
