"""Programs for fresh processes with several devices or the TPU's compiler: see suites/xla/programs.py.

SPMD is decided once per process and imports are slow, so one process serves every mesh of its number of devices.

B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from suites.support.child import run_json
from suites.xla import aot
from suites.xla.programs import program

BATCH, TOKENS, STEPS = 8, 32, 3
# (expert, model): the four shapes of a mesh.
MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))
GIB = 1 << 30


@cache
def on_meshes(platform: str) -> dict[str, Any]:
    """Run trained_on_meshes in a new process, once; with the TPU's compiler if the device is the CPU."""
    topology, environment = "", {"PJRT_DEVICE": platform}
    if platform == "CPU":
        topology, environment = "v6e:2x2", aot.ENVIRONMENT | {"CPU_NUM_DEVICES": "4"}
    return run_json(__name__, "trained_on_meshes", topology, environment=environment, timeout=570)


def small_moe() -> Any:
    """Return a config of attention with Engram, experts, Mamba: block kinds whose parameters shard differently."""
    from model import preset
    from model.config import EngramConfig

    engram = EngramConfig(layers=(0,))
    return preset("nam12", "narrow", layer_pattern="AEM", depth=3, experts=8, top_k=2, engram=engram)


def traced_step(made: Any, ids: Any) -> list[Any]:
    """Return the outputs of one step: loss, parameters and optimizer state, traced and not executed."""
    loss = made.model(ids)
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad(set_to_none=True)
    return [loss.detach(), *made.state()]


@program
def compiled_for_one_chip(name: str, *gib: str) -> dict[str, Any]:
    """Compile the whole narrow preset's train step for v6e:1x1; then programs with results of the given GiB."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from launch.xla.steps import prepare
    from model import preset
    from suites.xla import support

    made = support.on_device(preset(name, "narrow"))
    prepare(made.model, made.optimizer)
    ids, x = made.batch(), torch.ones(1).to(torch_xla.device())
    torch_xla.sync()
    found = aot.compile_for("v6e:1x1", xm.get_stablehlo_bytecode(traced_step(made, ids))).to_json()
    refusals = {}
    for size in gib:
        large = x + torch.zeros(int(size) * GIB // 1024 // 4, 1024, device=torch_xla.device())
        try:
            aot.compile_for("v6e:1x1", xm.get_stablehlo_bytecode([large]))
            refusals[size] = ""
        except aot.AotError as error:
            refusals[size] = str(error)
    return found | {"refusals": refusals}


@program
def trained_on_meshes(topology: str) -> dict[str, Any]:
    """Run three AdamW steps of the small hybrid on each mesh and in eager mode; compile its step for a topology."""
    import torch
    import torch_xla

    from launch.xla import sharding
    from suites.xla import support

    sharding.start_spmd()
    meshes = {}
    for expert, model in MESHES:
        mesh = sharding.make_mesh(expert, model)
        name = "-".join(mesh.axis_names)
        meshes[name] = _trained(mesh, topology if name == "data-expert" else "")
    # After the first tensor on the device: a backward before it leaves autograd without a queue for the device.
    losses = support.eager_losses(small_moe(), STEPS, BATCH)
    on_host = torch.tensor(losses[-1])
    with support.counted() as read:
        on_host.to(torch_xla.device()).add(1).item()
    return {"meshes": meshes, "swapped": _swapped(), "eager": losses, "downloads_of_item": read.downloads}


def _trained(mesh: Any, topology: str) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from launch.xla import sharding
    from launch.xla.steps import TrainStep
    from suites.xla import support

    made = support.on_device(small_moe())
    sharding.annotate(made.model, mesh, made.optimizer)
    step = TrainStep(made.model, made.optimizer)
    batches = [sharding.shard_batch(made.batch(BATCH, TOKENS, seed), mesh) for seed in range(STEPS)]
    torch_xla.sync()
    losses, counts = [], []
    for ids in batches:
        before = support.replicated_executions()
        with support.counted() as count:
            losses.append(step([ids]))
        counts.append([count.compiles, support.replicated_executions() - before, count.downloads])
    found = {
        "shape": [int(size) for size in mesh.mesh_shape],
        "losses": [loss.item() for loss in losses],
        "counts": counts,
        "specs": sharding.annotations(dict(made.model.named_parameters())),
        "receipt": sharding.receipt(made.model, mesh),
    }
    if topology:
        bytecode = xm.get_stablehlo_bytecode(traced_step(made, batches[0]))
        found["aot"] = aot.compile_for(topology, bytecode).to_json()
    return found


def _swapped() -> dict[str, Any]:
    """Annotate the experts on a mesh whose last two axes are swapped, bypassing launch.xla.sharding."""
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as runtime

    from launch.xla import sharding

    devices = runtime.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(devices), (devices // 4, 2, 2), ("data", "model", "expert"))
    experts = torch.zeros(8, 64, 16).to(torch_xla.device())
    xs.mark_sharding(experts, mesh, sharding.SHARDED["up", 3])
    try:
        sharding.check_axes(mesh.axis_names)
        refusal = ""
    except sharding.ShardingError as error:
        refusal = str(error)
    return {"up": sharding.annotations({"up": experts})["up"], "refusal": refusal}


@program
def audited() -> dict[str, Any]:
    """Annotate a model with every feature enabled over all devices; then replace an Engram weight by surgery."""
    import torch
    import torch_xla
    from torch import nn

    from launch.xla import sharding
    from model.engram import EngramBranch
    from suites.xla import support

    sharding.start_spmd()
    made = support.on_device(everything_on())
    bare = sharding.unannotated(made.model)
    mesh = sharding.make_mesh(2, 2)
    sharding.annotate(made.model, mesh, made.optimizer)
    found = {"before": len(bare), "after": sharding.unannotated(made.model)}
    found |= {"receipt": sharding.receipt(made.model, mesh), "again": sharding.receipt(made.model, mesh)}
    states = {
        str(i): t for i, t in enumerate(made.state()) if t.ndim and i >= len(list(made.model.parameters()))
    }
    found["states"] = sum(bool(spec) for spec in sharding.annotations(states).values())
    branch = next(m for m in made.model.modules() if isinstance(m, EngramBranch))
    branch.mix = nn.Parameter(torch.zeros(branch.mix.shape).to(torch_xla.device()))
    found["planted"] = sharding.unannotated(made.model)
    found["refusal"] = _refusal(lambda: sharding.receipt(made.model, mesh))
    return found | {"reductions": _reductions()} | {"memory": _memory_messages()}


def everything_on() -> Any:
    """Return a config with each feature that has its own parameters, on a layer of each letter."""
    from model import preset
    from model.config import EngramConfig, HyperConfig, MTPConfig, NgramConfig, StructureConfig, TreeConfig

    return preset(
        "nam12", "narrow", layer_pattern="AEMR", depth=4, experts=8, top_k=2, null_rho=0.5, attention_gate="head",
        ngram=NgramConfig(table=500), structure=StructureConfig(dim=16), tree=TreeConfig(24, 24, 16),
        engram=EngramConfig(layers=(0,)), mtp=MTPConfig(), hyper=HyperConfig(layers=3, mix_branches=True),
    )  # fmt: skip


def _refusal(act: Callable[[], Any]) -> str:
    """Return the error of a rule of this project against `act`, "" if it is allowed."""
    from launch.xla.sharding import ShardingError
    from launch.xla.steps import XlaError
    from launch.xla.tpu_memory import MemoryReadingError

    try:
        act()
    except (ShardingError, MemoryReadingError, XlaError) as error:
        return str(error)
    return ""


def _reductions() -> dict[str, Any]:
    """Sum one metric over all devices, and apply three reductions that are not global."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as runtime

    from launch.xla import sharding

    devices = runtime.global_runtime_device_count()
    local = torch.arange(float(devices)).unsqueeze(1).to(torch_xla.device())
    xs.mark_sharding(local, sharding.make_mesh(), ("data", None))

    def raised(x: Any) -> Any:
        raise RuntimeError("the other hosts are gone")

    def swallowed(x: Any) -> Any:
        try:
            return raised(x)
        except RuntimeError:
            return x

    refused = {"stock": lambda x: xm.all_reduce(xm.REDUCE_SUM, x), "swallowed": swallowed, "raised": raised}
    alone = torch.ones(1).to(torch_xla.device())
    total = sharding.global_sums(local, lambda x: x.sum(0), devices)
    return {
        "devices": devices,
        "sum": total.item(),
        "refusals": {
            name: _refusal(lambda reduce=reduce: sharding.global_sums(alone, reduce, devices))
            for name, reduce in refused.items()
        },
    }


def _memory_messages() -> dict[str, Any]:
    """Return the memory messages for the virtual device, and for a physical one by its runtime name."""
    import torch_xla
    import torch_xla.runtime as runtime

    from launch.xla.steps import memory_in_use
    from launch.xla.tpu_memory import BINDING, chip_memory

    chip = f"{runtime.device_type()}:0"
    acts = {
        "SPMD:0": memory_in_use,
        "physical": lambda: memory_in_use(chip),
        "binding": lambda: chip_memory(chip),
    }
    refusals = {name: _refusal(act) for name, act in acts.items()}
    return refusals | {"has_binding": hasattr(torch_xla._XLAC, BINDING)}


@program
def topology() -> dict[str, Any]:
    """Return the chips of the smallest topology, once libtpu has parsed its flags."""
    devices = aot.chips("v6e:1x1")
    return {"chips": len(devices), "kind": devices[0].device_kind}


if __name__ == "__main__":
    program.main()
