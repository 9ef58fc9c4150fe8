"""Model parallelism of a hybrid: attention heads over the ranks of one row (tensor), experts over all rows (expert).

Both are functions for `parallelize(shard=...)`: they replace parameters by DTensors in place, so that names, types and
gathered checkpoints are as for the model on one rank.

E experts, D model dim, F expert hidden, S slots, N ranks, C slots of an expert on a rank.
"""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from launch.contract import ContractError
from model import Hybrid
from model.attention import AttentionBlock
from model.moe import MoEBlock

# The groups of `exchange` by number: a custom op takes numbers and tensors in every torch, a group only in newer ones.
_GROUPS: list[dist.ProcessGroup] = []


def shard_attention(model: Hybrid, mesh: DeviceMesh) -> int:
    """Divide the heads of every grouped-query block over the ranks of `mesh`, of one axis -> the blocks divided.

    Each rank projects and attends for its heads; the output projection adds the ranks up. The ranks must see the same
    batch. Latent and sparse attention, and a block whose output is gated, stay whole.
    Raises ContractError if the heads cannot be divided, or no block can.
    """
    divided = 0
    for block in model.blocks:
        # A sparse block is a subclass, and its indexer needs the distribution over all heads.
        if type(block) is not AttentionBlock or block.gate is not None:
            continue
        for layer in (block.query, block.key):
            if (heads := layer.out_features // block.head_dim) % mesh.size():
                raise ContractError(f"{heads} heads cannot be divided over {mesh.size()} ranks")
        plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
        parallelize_module(block, mesh, {**plan, "output": RowwiseParallel()})
        divided += 1
    if not divided:
        raise ContractError(f"{model.config.name} has no attention block whose heads can be divided")
    return divided


def shard_experts(model: Hybrid, mesh: DeviceMesh) -> int:
    """Divide the experts of every E block over the ranks of `mesh`, of one axis -> the blocks divided.

    A rank sends each expert's slots to the rank that holds it and gets the results back, in the backward again.
    Raises ContractError if the experts cannot be divided, or there are none.
    """
    blocks = [block for block in model.blocks if isinstance(block, MoEBlock)]
    experts = blocks[0].experts if blocks else 0
    if not experts or experts % mesh.size():
        raise ContractError(f"{experts or 'no'} experts cannot be divided over {mesh.size()} ranks")
    _GROUPS.append(mesh.get_group())
    for block in blocks:
        for name in ("up", "down"):
            given = getattr(block, name)
            part = nn.Parameter(distribute_tensor(given.detach(), mesh, [Shard(0)], src_data_rank=None))
            part.register_hook(lambda gradient: gradient / mesh.size())
            setattr(block, name, part)
        block.exchanged = len(_GROUPS) - 1, mesh.size()
        block.run_experts = types.MethodType(_run_experts, block)  # type: ignore[method-assign]
    return len(blocks)


def _run_experts(block: MoEBlock, padded: Tensor) -> Tensor:
    """padded (E,C,D), this rank's slots of all experts -> (E,C,D)."""
    group, N = block.exchanged
    up, down = (p.to_local() for p in (block.up, block.down))  # (E/N,D,F), (E/N,F,D)
    E, C, D = padded.shape
    received = exchange(padded, group).view(N, E // N, C, D)
    slots = received.transpose(0, 1).reshape(E // N, N * C, D)
    hidden = F.relu(torch.bmm(slots, up)).square()
    results = torch.bmm(hidden, down).view(E // N, N, C, D).transpose(0, 1).reshape(E, C, D)
    return exchange(results, group)


@torch.library.custom_op("bumpgate::exchange", mutates_args=())
def exchange(x: Tensor, group: int) -> Tensor:
    """Send the n-th of N equal parts of x (E,C,D) to rank n -> the parts received, in the order of ranks (E,C,D)."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=_GROUPS[group])
    return received


@exchange.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    ctx.group = inputs[1]


def _backward(ctx, gradient):
    return exchange(gradient, ctx.group), None


exchange.register_autograd(_backward, setup_context=_setup_context)
