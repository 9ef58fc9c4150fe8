"""Comparable times of CUDA kernels: medians of events, a cold L2, and the ceilings measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bumpgate.process.gpu_shares import untimed

CALLS = 20
WARMUP = 5
# Overwritten before each call. The L2 is a twentieth of it. At the copy's rate eight passes take 2 ms or more, in which
# the host enqueues the whole call, so that launches and autograd's bookkeeping are not timed.
FLUSHED_BYTES = 1 << 30
FLUSHES = 8
COPIED_BYTES = 1 << 30
MATMUL_SIZE = 8192


class Timing(NamedTuple):
    """The median and its 99 % interval: of one call, in milliseconds, or of any other samples.

    witness: number of samples.
    """

    median: float
    low: float
    high: float
    witness: int = 0
    instruments: tuple[str, ...] = ()

    def evidence(self) -> tuple[str, ...]:
        return ()


def milliseconds(function: Callable[[], object], calls: int = CALLS, warmup: int = WARMUP) -> Timing:
    """Time `function` on the GPU by CUDA events, with the L2 overwritten before each call, after `warmup` untimed
    calls.

    A device synchronization inside the function is included in its time. A run that fills compile caches calls it once.
    """
    if untimed():
        calls, warmup = 1, 0
    for _ in range(warmup):
        _timed(function)
    return median([_timed(function) for _ in range(calls)])


def alternately(
    functions: Sequence[Callable[[], object]], calls: int = CALLS, warmup: int = WARMUP
) -> list[list[float]]:
    """Time each function as `milliseconds` does, one call of each in turn, so that drift affects all of them alike."""
    for function in functions:
        for _ in range(warmup):
            _timed(function)
    rounds = [[_timed(function) for function in functions] for _ in range(calls)]
    return [[*times] for times in zip(*rounds)]


def median(samples: Sequence[float]) -> Timing:
    """Return the median and the order statistics that enclose it at 99 %; for few samples, the minimum and maximum."""
    ordered, n = sorted(samples), len(samples)
    # Ranks of the binomial 99 % interval of a median: 1.29 sqrt(n) to either side.
    reach = int(1.29 * n**0.5 + 1)
    low, high = ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]
    return Timing(statistics.median(ordered), low, high, n)


def _timed(function: Callable[[], object]) -> float:
    flush = _flushed()
    for value in range(FLUSHES):
        flush.fill_(value)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@cache
def _flushed() -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")


class Rate(NamedTuple):
    """A rate per second: by the median call, and by the order statistics that enclose it at 99 %."""

    median: float
    low: float
    high: float


def rate_of(work: float, timing: Timing) -> Rate:
    """Return `work` per second of a call that was timed in milliseconds."""
    return Rate(*(1e3 * work / ms for ms in (timing.median, timing.high, timing.low)))


@cache
def copied() -> Rate:
    """Return bytes per second, read and written, of a large device-to-device copy: the ceiling of memory-bound ops."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rate_of(2 * COPIED_BYTES, milliseconds(lambda: target.copy_(source)))


@cache
def multiplied() -> Rate:
    """Return the FLOP per second of one large bf16 matrix product: the ceiling of compute-bound ops."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return rate_of(2 * MATMUL_SIZE**3, milliseconds(lambda: a @ b))


def copy_rate() -> float:
    return copied().median


def matmul_rate() -> float:
    return multiplied().median


def floor_milliseconds(bytes: float, flops: float) -> float:
    """Return the least time of a call that moves `bytes` and computes `flops`, by this machine's ceilings."""
    return 1e3 * max(bytes / copy_rate(), flops / matmul_rate())


def forward_and_backward(
    function: Callable[..., Tensor | tuple[Tensor, ...]], leaves: Sequence[Tensor]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions to time: function(*leaves) without a graph, and with the gradients of its first result.

    Floating-point `leaves` get gradients; the others, such as document ids, are passed on.
    """
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in leaves]
    differentiable = [t for t in inputs if t.requires_grad]

    def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
        return result if isinstance(result, Tensor) else result[0]

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs)

    cotangent = torch.randn_like(first(forward()))

    def both() -> object:
        return torch.autograd.grad(first(function(*inputs)), differentiable, cotangent, allow_unused=True)

    return forward, both
