"""The state of the GPU around a timed test: clocks, power, temperature, throttle reasons and foreign processes.

Read from NVML (nvidia-ml-py). Power capping is normal on an H200 under load and is only reported.
Thermal slowdown, a power brake, foreign processes or an unreadable state make the row INFRA. Nothing is read while a
test measures, because that would be timed as well; what happens between two readings shows in NVML's count of the time
lost to heat.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bumpgate.plugin.rows import InfraError
from bumpgate.process.gpu_shares import first_gpu
from bumpgate.process.locks import locked

# Bits of nvml.h's nvmlClocksEventReasons.
REASONS = {
    0x1: "idle",
    0x2: "applications clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
HARDWARE_SLOWDOWN = 0x8
SPOILING = HARDWARE_SLOWDOWN | 0x20 | 0x40 | 0x80
# The maximum share of a test's time lost to heat: a median does not show it.
HOT_SHARE = 0.01
# Memory that a process holds outside torch's pool: its context, modules and kernel stacks. More than this belongs to
# another process; a foreign process that holds less goes unnoticed if processes cannot be identified.
UNEXPLAINED_BYTES = 2 << 30
# Not $TMPDIR: two users of one GPU must share the locks.
LOCKS = Path("/tmp")


@dataclass(frozen=True)
class State:
    """One reading. Clocks in MHz, watts, degrees Celsius.

    reasons: bits of REASONS. hot_seconds: how long heat has limited the clocks since the
    driver was loaded, None if not reported. strangers: compute processes that do not belong to this session, None if
    the driver's process ids are of another namespace. unexplained: bytes in use that this process did not reserve.
    """

    uuid: str
    sm: float
    memory: float
    watts: float
    celsius: float
    reasons: int
    hot_seconds: float | None
    strangers: tuple[int, ...] | None
    unexplained: int


def read() -> State:
    """Read the state of CUDA's first GPU. Raises InfraError, one line, if nothing reports it."""
    state = _read_once()
    if state.reasons & SPOILING == HARDWARE_SLOWDOWN:
        time.sleep(0.05)  # nvml.h: it may be reported in the middle of a clock change
        state = _read_once()
    return state


def _read_once() -> State:
    gpu = first_gpu()
    try:
        import pynvml
    except ImportError:
        raise InfraError(f"the state of GPU {gpu} is unknown: no NVML; pip install nvidia-ml-py") from None
    # An index means the same to CUDA and to NVML if all GPUs of a machine are alike.
    return _by_nvml(pynvml, gpu)


def _by_nvml(nvml: Any, gpu: str) -> State:
    try:
        nvml.nvmlInit()  # NVML counts the calls: only the first one in a process has an effect
        handle = _handle(nvml, gpu)
        return State(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            sm=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            celsius=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            hot_seconds=_hot_seconds(nvml, handle),
            strangers=_strangers(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            unexplained=nvml.nvmlDeviceGetMemoryInfo(handle).used - _reserved(),
        )
    except (nvml.NVMLError, AttributeError) as error:
        raise InfraError(f"the state of GPU {gpu} is unknown: NVML: {error}") from None


def _handle(nvml: Any, gpu: str) -> Any:
    if gpu.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return nvml.nvmlDeviceGetHandleByUUID(gpu)


def _hot_seconds(nvml: Any, handle: Any) -> float | None:
    try:
        return nvml.nvmlDeviceGetViolationStatus(handle, nvml.NVML_PERF_POLICY_THERMAL).violationTime / 1e9
    except nvml.NVMLError:
        return None


def _cuda() -> Any:
    """Return torch.cuda if this process has initialized the GPU; otherwise a reading need not import torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None


def _reserved() -> int:
    """Return the bytes that torch has reserved in this process."""
    cuda = _cuda()
    return cuda.memory_reserved(0) if cuda else 0


def _strangers(listed: Iterable[int]) -> tuple[int, ...] | None:
    """Return the driver's processes outside this session; None if its ids are of another namespace.

    That is the case if it does not list this process, which holds a context, or lists one that does not exist here.
    """
    pids = set(listed)
    if (_cuda() and os.getpid() not in pids) or not all(map(psutil.pid_exists, pids)):
        return None
    return tuple(sorted(pids - _session()))


def _session() -> set[int]:
    """Return this session's processes. xdist's workers are children of one controller; idle ones hold contexts, too."""
    root = psutil.Process()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent() or root
    return {root.pid, *(child.pid for child in root.children(recursive=True))}


def _only_worker() -> bool:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1


def spoiled(before: State, after: State, seconds: float, *, only_worker: bool = True) -> list[str]:
    """Return why a time taken between two readings, `seconds` apart, is invalid: a line per cause, empty if it is
    valid.

    only_worker: no other worker of this session holds GPU memory.
    """
    causes = []
    if before.uuid != after.uuid:
        causes.append(f"{before.uuid} before it and {after.uuid} after it")
    for when, state in (("before", before), ("after", after)):
        if state.reasons & SPOILING:
            causes.append(f"{_names(state.reasons & SPOILING)} {when} it")
    if before.hot_seconds is not None and after.hot_seconds is not None:
        hot = after.hot_seconds - before.hot_seconds
        if hot > HOT_SHARE * seconds:
            causes.append(f"heat held the clocks down for {hot:.2f} of {seconds:.2f} s")
    strangers = {*(before.strangers or ()), *(after.strangers or ())}
    if strangers:
        causes.append(f"foreign processes on it: {', '.join(map(str, sorted(strangers)))}")
    if before.strangers is None or after.strangers is None:
        came = after.unexplained - before.unexplained
        there = max(before.unexplained, after.unexplained) if only_worker else 0
        if max(came, there) > UNEXPLAINED_BYTES:
            causes.append(f"{max(came, there) / 2**30:.1f} GiB of its memory are not of this process")
    return causes


def state_line(before: State, after: State) -> str:
    """Format both readings in one line."""
    return (
        f"{after.uuid} by NVML, before and after: SM {before.sm:.0f}, {after.sm:.0f} MHz; "
        f"memory {before.memory:.0f}, {after.memory:.0f} MHz; {before.watts:.0f}, {after.watts:.0f} W; "
        f"{before.celsius:.0f}, {after.celsius:.0f} C; clocks held by {_names(before.reasons)}, {_names(after.reasons)}"
    )


def _names(reasons: int) -> str:
    return " + ".join(name for bit, name in REASONS.items() if reasons & bit) or "nothing"


@contextmanager
def alone_on_gpu() -> Iterator[Callable[[], str]]:
    """Lock the GPU against other sessions; yield a function that returns its state since then, in one line.

    That function raises InfraError if a time taken since then is invalid or the state is unreadable. Entering raises
    nothing: a test that times nothing and never calls it does not depend on the state.
    """
    found = _attempt()
    if isinstance(found, InfraError):
        yield lambda: _since(found, 0.0)
        return
    with locked(LOCKS / f"bumpgate-{found.uuid}", exclusive=True):
        before, started = _attempt(), time.monotonic()
        yield lambda: _since(before, started)


def _attempt() -> State | InfraError:
    try:
        return read()
    except InfraError as error:
        return error


def _since(before: State | InfraError, started: float) -> str:
    if isinstance(before, InfraError):
        raise before
    after = read()
    line = state_line(before, after)
    causes = spoiled(before, after, time.monotonic() - started, only_worker=_only_worker())
    if causes:
        raise InfraError(f"no time to trust: {'; '.join(causes)} ({line})")
    return line
