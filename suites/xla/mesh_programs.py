"""Programs for fresh processes with several devices, or with the TPU's compiler beside: see suites/xla/programs.py.

SPMD is decided once a process and imports are slow, so that one process serves every mesh of its number of devices.

B batch, T tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from suites.xla.programs import PROGRAMS, program

BATCH, TOKENS, STEPS = 8, 32, 3
# (expert, model): the four shapes of a mesh.
MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))


def small_moe() -> Any:
    """Attention with Engram, experts, Mamba: the kinds of block whose parameters are cut in different ways."""
    from model import preset
    from model.config import EngramConfig

    engram = EngramConfig(layers=(0,))
    return preset("nam12", "narrow", layer_pattern="AEM", depth=3, experts=8, top_k=2, engram=engram)


def traced_step(made: Any, ids: Any) -> list[Any]:
    """What one step writes: loss, parameters and optimizer state, traced and not executed."""
    loss = made.model(ids)
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad(set_to_none=True)
    return [loss.detach(), *made.state()]


@program
def compiled_for_one_chip(name: str) -> dict[str, Any]:
    """The whole narrow preset's train step, compiled for v6e:1x1."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from launch.xla import prepare
    from model import preset
    from suites.xla import aot, support

    made = support.on_device(preset(name, "narrow"))
    prepare(made.model, made.optimizer)
    ids = made.batch()
    torch_xla.sync()
    return aot.compile_for("v6e:1x1", xm.get_stablehlo_bytecode(traced_step(made, ids))).to_json()


@program
def compiled_over_budget(rows: str) -> dict[str, Any]:
    """A step of one attention layer at a batch of 2 and at one whose logits alone do not fit into a chip."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from launch.xla import prepare
    from model import preset
    from suites.xla import aot, support

    made = support.on_device(preset("nam12", "narrow", layer_pattern="A", depth=1))
    prepare(made.model, made.optimizer)
    found = {}
    for batch in (2, int(rows)):
        ids = made.batch(batch)
        torch_xla.sync()
        try:
            found[str(batch)] = aot.compile_for(
                "v6e:1x1", xm.get_stablehlo_bytecode([made.model(ids).detach()])
            ).temporary_bytes
        except aot.AotError as error:
            found[str(batch)] = str(error)
    return found


@program
def trained_on_meshes(compile_for: str) -> dict[str, Any]:
    """Three AdamW steps of the small hybrid on each mesh and in eager mode; compiled for `compile_for` unless empty."""
    import torch_xla

    from launch import sharding
    from launch.optimizers import AdamW
    from suites.support.hybrids import build, token_batch
    from suites.xla import support

    sharding.start_spmd()
    meshes = {}
    for expert, model in MESHES:
        mesh = sharding.make_mesh(expert, model)
        meshes["-".join(mesh.axis_names)] = _trained(mesh, compile_for)
    # After the first tensor on the device: a backward before it leaves autograd without a queue for the device.
    config = small_moe()
    eager, losses = build(config), []
    optimizer = AdamW(eager.parameters(), lr=1e-3)
    for seed in range(STEPS):
        loss = eager(token_batch(config, BATCH, TOKENS, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    with support.counted() as read:
        loss.detach().to(torch_xla.device()).add(1).item()
    return {"meshes": meshes, "eager": losses, "downloads_of_item": read.downloads}


def _trained(mesh: Any, compile_for: str) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from launch import sharding
    from launch.xla import TrainStep
    from suites.xla import aot, support

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
        executions = support.replicated_executions() - before
        counts.append([count.compiles, executions, count.downloads])
    found = {
        "shape": [int(size) for size in mesh.mesh_shape],
        "losses": [loss.item() for loss in losses],
        "counts": counts,
        "specs": sharding.annotations(dict(made.model.named_parameters())),
        "receipt": sharding.receipt(made.model, mesh),
    }
    if compile_for:
        bytecode = xm.get_stablehlo_bytecode(traced_step(made, batches[0]))
        found["aot"] = aot.compile_for(compile_for, bytecode).to_json()
    return found


if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
