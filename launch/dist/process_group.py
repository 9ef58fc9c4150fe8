"""The process group of a rank under the contract: its timeout, and the patches for a retry (rules C23, C25)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launch.contract import Contract
from launch.environment import RETRY
from launch.retry import REASON, Retry
from launch.warmup import MONITORING, Start, WarmUp


def timeout(contract: Contract) -> timedelta:
    """Return the contract's timeout for every group. It must be passed: torch has no environment variable for it."""
    return timedelta(seconds=int(contract.rank_variables["TORCH_DISTRIBUTED_DEFAULT_TIMEOUT"]))


def start(
    contract: Contract,
    retry: Retry,
    backend: str,
    *,
    device: torch.device | None = None,
    expert_parallel: bool = False,
    given: Mapping[str, str] = os.environ,
    **rendezvous: Any,
) -> None:
    """Create the default group and wait for the other ranks at a barrier; in a retry, apply the patches.

    device: this rank's accelerator, to which an eager group connects at once.
    rendezvous: init_process_group's own (store, rank, world_size), by default from the environment.
    """
    quiet_process(retry, given)
    eager = device is not None and not lazy(retry, device.type, given, expert_parallel)
    dist.init_process_group(
        backend, timeout=timeout(contract), device_id=device if eager else None, **rendezvous
    )
    if barrier(given, expert_parallel):
        dist.barrier()


def new_group(contract: Contract, ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Create another group with the contract's timeout: torch uses its own default, not the default group's."""
    return dist.new_group(ranks, timeout=timeout(contract), **options)


def quiet_process(retry: Retry, given: Mapping[str, str]) -> None:
    """Patch 2: the debug level in C++, which was read at import; changing the environment later has no effect."""
    if given.get(RETRY) and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(getattr(dist.DebugLevel, retry.debug_level))


def lazy(retry: Retry, device: str, given: Mapping[str, str], expert_parallel: bool) -> bool:
    """Patch 3: whether the group connects at its first collective only. A first launch is eager."""
    if not given.get(RETRY):
        return False
    every = retry.lazy_groups == "cuda" and device == "cuda"
    return every or expert_parallel or retry.errors.get(given.get(REASON, ""), False)


def barrier(given: Mapping[str, str], expert_parallel: bool) -> bool:
    """Patch 4: whether the ranks wait for each other at the start. Under expert parallelism a retry does not."""
    return not (given.get(RETRY) and expert_parallel)


def warm_up(table: WarmUp, begin: Start, compile: Callable[[], None], regroup: Callable[[], None]) -> str:
    """Run a rank's warm-up, then turn the monitor on again -> the name of the table that skips both, "" for none.

    compile: runs the warm-up. regroup: creates the groups of the run.
    """
    if skipped := table.skipped(begin):
        return skipped
    compile()
    monitor_again(table.monitoring, regroup)
    return ""


def monitor_again(value: str, regroup: Callable[[], None]) -> None:
    """Set NCCL's monitor after the warm-up as in the contract's [warmup.monitoring], for the groups of the run.

    NCCL reads the variable when it creates a group. Call it before DDP or FSDP2 reference one.
    """
    os.environ[MONITORING] = value
    if dist.is_initialized():
        dist.destroy_process_group()
    regroup()
