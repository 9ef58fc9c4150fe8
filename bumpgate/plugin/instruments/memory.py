"""Peak memory of a function: the fixture `peak_memory`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bumpgate.plugin.rows import InfraError

PROCESS = Path("/proc/self")
RESET_PEAK = "5"


@dataclass(frozen=True)
class Peak:
    """The most memory that a function held at once, above what the process held before.

    bytes: of the device; without a GPU, resident bytes of the process. calls: of the function.
    """

    bytes: int
    calls: int
    device: str
    instruments: tuple[str, ...] = field(default=())

    @property
    def witness(self) -> int:
        return self.calls if self.bytes > 0 else 0

    def evidence(self) -> list[str]:
        return [f"peak of {self.device}: {self.bytes / 2**20:.1f} MiB above the start, in {self.calls} calls"]


def peak_memory(function: Callable[[], object], *, calls: int = 2) -> Peak:
    """Return the peak memory of a function: the allocator's on a GPU, else of resident bytes.

    It is called `calls` times; each result is released before the next call, so that the peak is of one call.
    Resident bytes are exact to about 1 MiB.
    Raises InfraError if the system has no resettable peak (Linux has one).
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        return Peak(torch.cuda.max_memory_allocated() - before, calls, "the GPU's allocator")
    try:
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except OSError as error:
        raise InfraError(f"peak memory cannot be read here: {PROCESS}/clear_refs: {error.strerror}") from None
    before = _kilobytes("VmRSS")
    for _ in range(calls):
        function()
    return Peak(1024 * max(0, _kilobytes("VmHWM") - before), calls, "the process")


def _kilobytes(name: str) -> int:
    lines = (PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
