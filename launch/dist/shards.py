"""Tensors that are sharded over ranks, DTensors of FSDP2 and of tensor or expert parallelism, and plain ones alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(value: Any) -> Any:
    """Return a state with every sharded tensor gathered, in nested dicts and lists too. All ranks must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [whole(entry) for entry in value]
    return value


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """Return the whole of which `part` is this rank's shard, sharded as `like`; stacks of matrices stay as they are.

    A stack (E,A,B) that is sharded by whole matrices needs no other rank's part.
    """
    if not isinstance(like, DTensor) or (like.ndim == 3 and set(like.placements) <= {Shard(0), Replicate()}):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    ).full_tensor()


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """Return the part of `value` that this rank holds of `like`; a value of that size already is the part."""
    if not isinstance(like, DTensor) or value.shape == like.to_local().shape:
        return value
    return local(distributed(value, like))


def distributed(value: Tensor, like: Tensor) -> Tensor:
    """Return `value`, the same on all ranks, sharded as `like`. Sends nothing."""
    if not isinstance(like, DTensor):
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
