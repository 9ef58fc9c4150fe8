"""What a function asks of the device: the fixture `count_work`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Work:
    """The work of one eager call. Views count as operators that move no bytes.

    flops: of matrix products, convolutions and attention, as torch.utils.flop_counter counts them.
    bytes: of the tensors that operators read and write, without fusion and caches.
    operators: that reach ATen below autograd.
    launches: kernels that a GPU ran, also those of compiled code; None without one.
    """

    flops: int
    bytes: int
    operators: int
    launches: int | None = None
    instruments: tuple[str, ...] = ("work",)

    @property
    def witness(self) -> int:
        return self.operators + (self.launches or 0)

    def evidence(self) -> list[str]:
        return [f"{self.flops} FLOPs and {self.bytes} bytes in {self.operators} operators"]


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        if not func.is_view:
            found = tree_leaves((args, kwargs, result))
            self.bytes += sum(x.numel() * x.element_size() for x in found if isinstance(x, torch.Tensor))
        return result


def count_work(function: Callable[[], object]) -> Work:
    """Return the work of a function. It is called once before, so that caches are filled and code is compiled."""
    function()
    with FlopCounterMode(display=False) as flops, _Operators() as operators:
        function()
    launches = device_work(function).kernels if torch.cuda.is_available() else None
    return Work(flops.get_total_flops(), operators.bytes, operators.count, launches)


class DeviceWork(NamedTuple):
    """The device's own trace of one call: number of kernels, and their total milliseconds without idle time."""

    kernels: int
    milliseconds: float


def device_work(step: Callable[[], object]) -> DeviceWork:
    """Return what a GPU runs in one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [e for e in trace.events() if e.device_type == on_device and not e.name.startswith("Mem")]
    return DeviceWork(len(kernels), sum(e.time_range.elapsed_us() for e in kernels) / 1e3)
