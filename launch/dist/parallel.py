"""Multi-rank training of a hybrid: compiled regions under DDP or FSDP2, in the one order that works (C14).

build    the model from its constructor, with the same seed on every rank
shard    tensor or sequence parallelism, by the caller's function
compile  the policy's regions, in place: Module.compile keeps type and names, a wrapper changes both
fsdp2    or ddp; last, so that its hooks are around a compiled region and not inside it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from launch.contract import Contract, ContractError
from launch.policies import Backend, CompiledHybrid, apply
from model import Hybrid
from model.layers import widen
from model.moe import MoEBlock

STYLES = ("ddp", "fsdp2")
# One compile over straight-line code does not call the module hooks that DDP and FSDP2 rely on.
POLICIES = ("eager", "per_block", "regional")


@dataclass(frozen=True)
class Parallel:
    """compiled: the callable for a train step. order: the stages applied to the model."""

    compiled: CompiledHybrid
    order: tuple[str, ...]

    @contextmanager
    def held(self, hold: bool = True) -> Iterator[None]:
        """Keep gradients on their rank inside the block if `hold`: they are added to the gradients of the next backward."""
        forward, model = self.compiled.forward, self.compiled.model
        with ExitStack() as stack:
            if hold and isinstance(forward, DistributedDataParallel):
                stack.enter_context(forward.no_sync())
            elif hold:
                stack.callback(model.set_requires_gradient_sync, True)
                model.set_requires_gradient_sync(False)
            yield


def parallelize(
    model: Hybrid,
    contract: Contract,
    mesh: DeviceMesh | None,
    style: str,
    policy: str = "",
    *,
    backend: Backend = "inductor",
    shard: Callable[[Hybrid], object] | None = None,
    before_ddp: Callable[[CompiledHybrid], None] | None = None,
    unused: bool = False,
) -> Parallel:
    """Compile and wrap `model`, in place, for the ranks of a mesh of one axis. Gradients become means over ranks.

    mesh: None for DDP over the default group.
    policy: by default the contract's.
    shard: tensor or expert parallelism, applied to the model before it is compiled.
    before_ddp: called with the compiled model while no wrapper references a group: a warm-up that new groups follow.
    unused: whether a parameter may have a gradient on some ranks only, for which the others would wait.
    Raises ContractError, one line, on a policy or style that does not support ranks, a model that is already compiled
    or wrapped, a stage that changes types or names, and if this torch's FSDP2 does not support unused parameters.
    """
    policy = policy or contract.default_policy
    if style not in STYLES or policy not in POLICIES:
        raise ContractError(
            f"{style} with {policy}: ranks support {' and '.join(STYLES)}, with {', '.join(POLICIES)}"
        )
    _check_as_built(model)
    before, order = identity(model), ["build"]
    if shard is not None:
        shard(model)
        _check_as_built(model)
        check_identity(model, before)
        order.append("shard")
    compiled = apply(model, policy, contract, backend)
    check_identity(model, before)
    order.append("compile")
    if style == "ddp":
        if before_ddp is not None:
            before_ddp(compiled)
        options = {"find_unused_parameters": unused, **_own_buffers()}
        compiled.forward = DistributedDataParallel(model, device_mesh=mesh, **options)
    else:
        _fully_shard(model, mesh, unused)
        check_identity(model, before, subclasses=True)
    return Parallel(compiled, (*order, style))


def identity(model: nn.Module) -> dict[str, type]:
    """Map name -> type of every module, parameter and state_dict entry; plans and checkpoints depend on these."""
    tensors = dict.fromkeys([*dict(model.named_parameters()), *model.state_dict()], Tensor)
    return {name: type(module) for name, module in model.named_modules()} | tensors


def check_identity(model: nn.Module, before: dict[str, type], subclasses: bool = False) -> None:
    """Raise ContractError if a name was added or removed, or a module's type changed.

    subclasses: FSDP2 derives each module's type from its own, which isinstance does not notice.
    """
    after = identity(model)
    if changed := sorted(before.keys() ^ after.keys()):
        raise ContractError(
            f"{changed[0]} and {len(changed) - 1} more names were added or removed: {AS_BUILT}"
        )
    for name, kind in before.items():
        if not (issubclass(after[name], kind) if subclasses else after[name] is kind):
            raise ContractError(f"{name} was {kind.__name__} and is {after[name].__name__}: {AS_BUILT}")


AS_BUILT = "the order is build, shard, compile by Module.compile, then DDP or FSDP2"


def _check_as_built(model: Hybrid) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ContractError(f"{name or 'the model'} is under FSDP2 already: {AS_BUILT}")
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ContractError(f"{name or 'the model'} is compiled already: {AS_BUILT}")


def _own_buffers() -> dict[str, bool]:
    """Return DDP's option (renamed in torch) that keeps buffers local to each rank.

    By default each forward broadcasts rank 0's buffers to all ranks, including its overflow counts.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _fully_shard(model: Hybrid, mesh: DeviceMesh, unused: bool) -> None:
    """Apply fully_shard per block; the embedding, also read by the head, is in the root's group.

    Experts that are sharded over the same ranks already stay as they are.
    """
    placed = {p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh == mesh}
    options: dict[str, Any] = {"ignored_params": placed} if placed else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if unused:
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            raise ContractError(f"torch {torch.__version__}: FSDP2 cannot reduce unused parameters, DDP can")
        model.set_reduce_scatter_unused_params(True)


def average_buffers(model: Hybrid, group: dist.ProcessGroup | None = None) -> None:
    """Average the floating-point buffers over the ranks after a step: the experts' running load and selection bias."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([widen(buffer.flatten()) for buffer in buffers])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(mean.view_as(buffer))


def overflow(model: Hybrid, group: dist.ProcessGroup | None = None) -> int:
    """Return dropped (token, expert) pairs of all ranks since construction. Syncs the device: not for use in a step."""
    counts = [block.overflow for block in model.modules() if isinstance(block, MoEBlock)]
    if not counts:
        return 0
    total = torch.stack(counts).sum()
    dist.all_reduce(total, group=group)
    return int(total)
