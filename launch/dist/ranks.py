"""The ranks of one training: how they divide it, their meeting, what they share, and their process group.

torchrun and `python -m launch.retry --ranks N` start the ranks. Everything before the first collective, and waiting
for a rank that compiles longer, goes through a store, which works between different versions of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launch.contract import Contract, ContractError
from launch.dist import process_group
from launch.dist.model_parallel import shard_attention, shard_experts
from launch.retry import load_retry
from model import Hybrid

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Layout:
    """How ranks divide model and batch.

    style: "ddp" or "fsdp2".
    tensor: number of ranks that divide the attention heads between them and see the same rows.
    expert: whether the ranks of different rows divide the experts.
    """

    style: str = "ddp"
    tensor: int = 1
    expert: bool = False

    def shares(self, world: int) -> int:
        """Return the number of shares of each batch. Raises ContractError if the ranks do not fit."""
        if (self.tensor > 1 or self.expert) and self.style != "fsdp2":
            raise ContractError(f"tensor and expert parallelism are for style fsdp2, not {self.style}")
        if world % self.tensor:
            raise ContractError(f"{world} ranks cannot be divided into groups of {self.tensor}")
        return world // self.tensor


ONE_EACH = Layout()


class Ranks:
    """This process as one of `world` ranks. device: its accelerator, or the CPU, on which ranks use gloo.

    Raises ContractError, one line, if a variable of the rank is missing or this host has no GPU for it.
    """

    def __init__(
        self,
        contract: Contract,
        device: str = "cpu",
        layout: Layout = ONE_EACH,
        *,
        given: Mapping[str, str] = os.environ,
    ) -> None:
        if missing := [name for name in VARIABLES if not given.get(name)]:
            raise ContractError(
                f"LOCAL_RANK is set without {missing[0]}: start ranks by torchrun or launch.retry --ranks"
            )
        self.rank, self.local, self.world = (int(given[name]) for name in VARIABLES[:3])
        self.contract, self.given, self.layout = contract, given, layout
        self.device = torch.device(device)
        self.backend = "gloo"
        if self.device.type == "cuda":
            if self.local >= (count := torch.cuda.device_count()):
                raise ContractError(f"rank {self.rank}: no GPU {self.local}, {count} are here")
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
            expert_parallel=self.layout.expert,
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

    def place(self) -> tuple[DeviceMesh | None, tuple[int, int], Callable[[Hybrid], object] | None]:
        """Return the mesh for FSDP2, this rank's (share, shares) of a batch, and what divides the model's blocks.

        None as a mesh is DDP over the default group, which a warm-up may replace.
        """
        layout = self.layout
        shares = layout.shares(self.world)
        share = self.rank // layout.tensor, shares
        if layout.style == "ddp":
            return None, share, None
        names = ("data", "tensor")
        mesh = init_device_mesh(self.device.type, (shares, layout.tensor), mesh_dim_names=names)

        def divide(model: Hybrid) -> None:
            if layout.tensor > 1:
                shard_attention(model, mesh["tensor"])
            if layout.expert:
                shard_experts(model, mesh["data"])

        return mesh["data"], share, divide if layout.tensor > 1 or layout.expert else None

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the ranks."""
        dist.all_reduce(value)
        return value / self.world
