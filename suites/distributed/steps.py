"""Programs of ranks that time: steps of a training with and without the exchange of gradients, and the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from launch.data import PackedBatches, TokenFile
from launch.dist.ranks import Ranks
from launch.train import Trainer, TrainingPlan
from model import preset
from suites.launch.trainers import CORPUS
from suites.support.calibrations import OF_GPU
from suites.support.instruments import compile_phases, peak_rss_bytes

ROUNDS = 5
# What ranks send each other: a bucket of DDP, and a large part of the gradients.
BUCKET, GRADIENTS = 25 << 20, 1 << 30
# Of a host that ranks share: the exchange, and what each GPU does on its own.
OF_A_RANK = ("memory/copy_bytes_per_second", "matmul/matmul_flops", "launch/launch_microseconds")
UNITS = {f"calibration/{name}": OF_GPU[f"calibration/{name}"].unit for name in OF_A_RANK}


@dataclass(frozen=True)
class Work:
    """What each rank trains: the preset, its part of the batch, and the steps that are timed at a time."""

    name: str
    size: str
    rows: int
    tokens: int
    steps: int
    dtype: str = "float32"
    pattern: str = ""


def measure(ranks: Ranks, policy: str, work: dict[str, Any], delay: float = 0.0) -> dict[str, Any]:
    """Time steps with and without the exchange of gradients, in turn -> medians of seconds per step, MiB at the peak,
    and the CPU seconds of compiling.

    The difference is what the exchange adds to a step: the part of it that no computation hides.
    work: the fields of Work. delay: seconds that each bucket's exchange waits first.
    """
    do = Work(**work)
    changed = {"layer_pattern": do.pattern, "depth": len(do.pattern)} if do.pattern else {}
    source = PackedBatches(TokenFile(CORPUS), do.rows * ranks.world, do.tokens, 0)
    plan = TrainingPlan(2 + 2 * ROUNDS * (do.steps + 1), policy=policy, dtype=do.dtype)
    with compile_phases() as phases:
        run = Trainer(
            preset(do.name, do.size, **changed), plan, source, device=str(ranks.device), ranks=ranks
        )
        if delay:
            # DDP inspects the hook: it has a name, and no annotations of ours.
            run.compiled.forward.register_comm_hook(None, lambda group, bucket: _late(delay, group, bucket))  # type: ignore[attr-defined]
        run.run(until=2)
    exchanging = run.share
    local = replace(exchanging, held=lambda _: exchanging.held(True))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for exchange, share in ((True, exchanging), (False, local)):
            run.share = share
            ranks.meet()
            rate = run.run(until=run.step + do.steps + 1)["tokens_per_second"]
            seconds[exchange].append(do.rows * ranks.world * do.tokens / rate)
    on_gpu = ranks.device.type == "cuda"
    return {
        "step": _median(seconds[True]),
        "step_without_exchange": _median(seconds[False]),
        "tokens": do.rows * do.tokens,
        "peak": (torch.cuda.max_memory_allocated() if on_gpu else peak_rss_bytes()) / 2**20,
        "compile": sum(phase or 0.0 for phase in asdict(phases).values()),
        "timed": len(seconds[True]) * do.steps,
    }


def _late(delay: float, group: Any, bucket: Any) -> Any:
    """Exchange one bucket as DDP does, after a delay in seconds."""
    time.sleep(delay)
    return allreduce_hook(group, bucket)


def _median(seconds: list[float]) -> float:
    return float(torch.tensor(seconds, dtype=torch.float64).median())  # NaN if any value is


def calibrate(ranks: Ranks, bucket: int = BUCKET, gradients: int = GRADIENTS) -> dict[str, float]:
    """Measure the exchange between the ranks in bytes per second, and each GPU on its own -> row id: value."""
    ranks.meet()
    found = {
        f"exchange/{name}_bytes_per_second": size / _seconds(ranks, exchange)
        for name, size, exchange in (
            ("all_reduce", gradients, _all_reduce(ranks, gradients)),
            ("all_reduce_of_a_bucket", bucket, _all_reduce(ranks, bucket)),
            ("all_gather", bucket * ranks.world, _all_gather(ranks, bucket)),
        )
    }
    if ranks.device.type == "cuda":
        found |= {name: OF_GPU[f"calibration/{name}"].function() for name in OF_A_RANK}
    return {f"calibration/{name}": value for name, value in found.items()}


def _all_reduce(ranks: Ranks, size: int) -> Callable[[], object]:
    sent = torch.zeros(size // 4, device=ranks.device)
    return lambda: dist.all_reduce(sent)


def _all_gather(ranks: Ranks, size: int) -> Callable[[], object]:
    sent = torch.zeros(size // 4, device=ranks.device)
    found = torch.empty(ranks.world * sent.numel(), device=ranks.device)
    return lambda: dist.all_gather_into_tensor(found, sent)


def _seconds(ranks: Ranks, exchange: Callable[[], object], calls: int = 10) -> float:
    """Return the median seconds of a collective, after two untimed ones."""
    taken = []
    for _ in range(calls + 2):
        started = time.perf_counter()
        exchange()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])
