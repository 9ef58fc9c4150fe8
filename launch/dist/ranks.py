"""The ranks of one training: their meeting, what they must have in common, and their process group.

torchrun and `python -m launch.retry --ranks N` start one process per rank and set RANK, LOCAL_RANK, WORLD_SIZE and
the address of a store. Everything before the first collective, and waiting for a rank that compiles longer, goes
through the store, which needs no process group and works between different versions of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from launch.dist import process_group
from launch.contract import Contract, ContractError
from launch.retry import load_retry

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """This process as one of `world` ranks. device: its accelerator, or the CPU, on which ranks use gloo.

    Raises ContractError, one line, if a variable of the rank is missing or this host has no GPU for it.
    """

    def __init__(
        self,
        contract: Contract,
        device: str = "cpu",
        *,
        expert_parallel: bool = False,
        given: Mapping[str, str] = os.environ,
    ) -> None:
        if missing := [name for name in VARIABLES if not given.get(name)]:
            raise ContractError(
                f"LOCAL_RANK is set without {missing[0]}: start ranks by torchrun or launch.retry --ranks"
            )
        self.rank, self.local, self.world = (int(given[name]) for name in VARIABLES[:3])
        self.contract, self.given, self.expert_parallel = contract, given, expert_parallel
        self.device = torch.device(device)
        self.backend = "gloo"
        if self.device.type == "cuda":
            if self.local >= torch.cuda.device_count():
                raise ContractError(
                    f"rank {self.rank}: no GPU {self.local}, {torch.cuda.device_count()} are here"
                )
            self.device, self.backend = torch.device("cuda", self.local), "nccl"
            torch.cuda.set_device(self.device)
        timeout = process_group.timeout(contract)
        # Kept for the whole run: rank 0's is the server, and each set of groups gets a part of it.
        self.store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        self.store.set_timeout(timeout)
        self.started = self.met = 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return each rank's value, of JSON types, in the order of ranks; waits for all of them.

        Raises ContractError, one line, if a rank sends none within the contract's timeout.
        """
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return [self._get(name, rank) for rank in range(self.world)]

    def _get(self, name: str, rank: int) -> Any:
        try:
            return json.loads(self.store.get(f"{name}/{rank}"))
        except dist.DistStoreError:
            seconds = self.store.timeout.total_seconds()
            raise ContractError(f"rank {rank} has not sent its {name} in {seconds:g} s") from None

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise ContractError, the same line on all ranks, if a fact of a rank differs from rank 0's."""
        first, *others = self.gather("facts", dict(facts))
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs.get(name) != value:
                    raise ContractError(f"rank {rank} has {name} {theirs.get(name)}, rank 0 has {value}")

    def start(self) -> None:
        """Create the default group; after `stop` a new one."""
        self.started += 1
        process_group.start(
            self.contract,
            load_retry(),
            self.backend,
            device=self.device if self.backend == "nccl" else None,
            expert_parallel=self.expert_parallel,
            given=self.given,
            store=dist.PrefixStore(f"groups{self.started}", self.store),
            rank=self.rank,
            world_size=self.world,
        )

    def meet(self) -> None:
        """Wait for all ranks, without a collective: a rank that still compiles keeps no other in one."""
        self.met += 1
        self.gather(f"met{self.met}", True)

    def leave(self) -> None:
        """Destroy the groups once no rank is inside a collective; rank 0, which has the store, leaves last.

        Drop the wrapped model before: the reducer of a DDP that outlives its gloo group destroys it with the GIL held,
        and waits forever for a thread of the group that needs the GIL (suites/distributed/test_leaving.py).
        """
        self.meet()
        dist.destroy_process_group()
        if self.rank:
            self.store.set(f"left/{self.rank}", "")
        else:
            self.store.wait([f"left/{rank}" for rank in range(1, self.world)])

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the ranks."""
        dist.all_reduce(value)
        return value / self.world
