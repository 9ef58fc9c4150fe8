"""Peak memory of a function: the fixture `peak_memory`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import profile


@dataclass(frozen=True)
class Peak:
    """The most bytes that a function held at once, above what was held before.

    events: allocations that the CPU's profiler saw; on a GPU, of the caching allocator.
    """

    bytes: int
    events: int
    device: str
    instruments: tuple[str, ...] = ()

    @property
    def witness(self) -> int:
        return self.events

    def evidence(self) -> list[str]:
        return [
            f"{self.bytes / 2**20:.1f} MiB above the start on the {self.device}, {self.events} allocations"
        ]


def peak_memory(function: Callable[[], object]) -> Peak:
    """Return the peak memory of torch's allocator while a function runs: of the GPU if there is one, else of the CPU.

    A first call fills caches and is not measured. Memory that a library takes without torch's allocator is not counted.
    """
    function()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, before = torch.cuda.memory_allocated(), _allocations()
        function()
        torch.cuda.synchronize()
        return Peak(torch.cuda.max_memory_allocated() - held, _allocations() - before, "GPU")
    with profile(profile_memory=True) as profiled:
        function()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return Peak(most, len(events), "CPU")


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
