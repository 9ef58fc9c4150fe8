"""How the ranks of a training divide model and batch, as a choice of the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launch.contract import ContractError
from launch.dist.model_parallel import shard_attention, shard_experts
from launch.dist.ranks import Ranks
from model import Hybrid


@dataclass(frozen=True)
class Layout:
    """style: "ddp" or "fsdp2". tensor: ranks that divide the attention heads between them and see the same rows.
    expert: whether the ranks divide the experts.
    """

    style: str = "ddp"
    tensor: int = 1
    expert: bool = False

    def shares(self, world: int) -> int:
        """Return into how many shares each batch is divided. Raises ContractError if the ranks do not fit."""
        if (self.tensor > 1 or self.expert) and self.style != "fsdp2":
            raise ContractError(f"tensor and expert parallelism are for style fsdp2, not {self.style}")
        if self.tensor > 1 and self.expert:
            raise ContractError("tensor and expert parallelism cannot be combined")
        if world % self.tensor:
            raise ContractError(f"{world} ranks cannot be divided into groups of {self.tensor}")
        return world // self.tensor

    def place(
        self, ranks: Ranks
    ) -> tuple[DeviceMesh | None, tuple[int, int], Callable[[Hybrid], object] | None]:
        """Return the mesh for FSDP2, this rank's (share, shares) of a batch, and what divides the model's blocks.

        None as a mesh is DDP over the default group, which a warm-up may replace.
        """
        shares = self.shares(ranks.world)
        share = ranks.rank // self.tensor, shares
        if self.style == "ddp":
            return None, share, None
        names = ("data", "tensor")
        mesh = init_device_mesh(ranks.device.type, (shares, self.tensor), mesh_dim_names=names)
        if self.tensor > 1:
            return mesh["data"], share, partial(shard_attention, mesh=mesh["tensor"])
        return mesh["data"], share, partial(shard_experts, mesh=mesh["data"]) if self.expert else None
