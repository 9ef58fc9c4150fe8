"""Build, shard, compile, FSDP2: recorded, observed from outside, and rejected in any other order. Rule C14."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from launch.contract import ContractError, load
from launch.dist import parallel
from launch.dist.model_parallel import shard_attention
from launch.dist.parallel import check_identity, identity, parallelize
from model import Hybrid, preset
from model.config import DSAConfig, MLAConfig
from suites.support.hybrids import build
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def model() -> Hybrid:
    return build(preset("nam12", "narrow"))


def stage(model: Hybrid) -> tuple[int, int]:
    """Return the regions under Module.compile and the groups of FSDP2."""
    modules = list(model.modules())
    return (
        sum(module._compiled_call_impl is not None for module in modules),
        sum(isinstance(module, FSDPModule) for module in modules),
    )


def test_parallelize_stage_order(mesh: DeviceMesh, model: Hybrid, monkeypatch, row) -> None:
    """Compare the record with the state of the model at the start of each stage."""
    seen, before = [], identity(model)
    blocks = len(model.blocks)
    letters = [type(block) for block in model.blocks]

    def shard(module: nn.Module, **options: object) -> None:
        seen.append(stage(model))
        if options:
            fully_shard(module, **options)

    monkeypatch.setattr(parallel, "fully_shard", shard)
    done = parallelize(model, load(), mesh, "fsdp2", backend="eager", shard=shard)
    about = {"expected": "build shard compile fsdp2", "seen": seen, "rule": "C14"}
    about["evidence"] = [f"{compiled} regions compiled, {groups} groups" for compiled, groups in seen]
    row.bound("distributed/nam12-fsdp2/order", " ".join(done.order), "stages", **about)
    assert seen == [(0, 0), *((blocks + 1, groups) for groups in range(blocks + 1))]
    assert done.compiled.policy == load().default_policy
    assert identity(model).keys() == before.keys()
    assert all(isinstance(block, kind) for block, kind in zip(model.blocks, letters))


def test_ddp_keeps_module_names_and_types(mesh: DeviceMesh, model: Hybrid, row) -> None:
    """Under DDP the model is otherwise unchanged: types and names stay identical."""
    before, state = identity(model), list(model.state_dict())
    done = parallelize(model, load(), mesh, "ddp", backend="eager")
    after = identity(model)
    changed = [name for name in {*before, *after} if before.get(name) is not after.get(name)]
    about = {"expected": 0, "seen": before, "rule": "C14"}
    row.count("distributed/nam12-ddp/names_and_types_changed", len(changed), **about)
    assert list(model.state_dict()) == state
    assert stage(model) == (len(model.blocks) + 1, 0)
    assert done.order == ("build", "compile", "ddp")


@planted("C14", "a block is wrapped by torch.compile before sharding")
@planted("C14", "FSDP2 before the regions are compiled")
def test_parallelize_refuses_other_stage_orders(mesh: DeviceMesh, model: Hybrid) -> None:
    before = identity(model)

    def wrap(model: Hybrid) -> None:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")

    with pytest.raises(ContractError, match=r"blocks\.0 is compiled already: the order is build, shard"):
        parallelize(model, load(), mesh, "fsdp2", shard=wrap)
    # The wrapper changes the names, which is why it is rejected.
    assert type(model.blocks[0]) is not before["blocks.0"]
    assert "blocks.0._orig_mod.query.weight" in model.state_dict()
    with pytest.raises(ContractError, match=r"and \d+ more names were added or removed"):
        check_identity(model, before)

    sharded = build(preset("nam12", "narrow", depth=4))
    fully_shard(sharded.blocks[1], mesh=mesh)
    with pytest.raises(ContractError, match=r"blocks\.1 is under FSDP2 already"):
        parallelize(sharded, load(), mesh, "fsdp2")
    compiled = build(preset("nam12", "narrow", depth=4))
    compiled.blocks[2].compile(backend="eager")
    with pytest.raises(ContractError, match=r"blocks\.2 is compiled already"):
        parallelize(compiled, load(), mesh, "ddp")


@pytest.mark.parametrize(
    ("style", "policy"), [("fsdp2", "whole_opaque"), ("ddp", "whole_disabled"), ("fsdp1", "")]
)
def test_parallelize_refuses_unsupported_style_or_policy(
    mesh: DeviceMesh, model: Hybrid, style: str, policy: str
) -> None:
    with pytest.raises(ContractError, match="ranks support ddp and fsdp2, with eager, per_block, regional"):
        parallelize(model, load(), mesh, style, policy)
    assert stage(model) == (0, 0)


@pytest.mark.parametrize("rest", [{}, {"mla": MLAConfig(16, 16, 16, 16, 16)}], ids=["grouped", "latent"])
def test_latent_and_sparse_blocks_are_not_divided(mesh: DeviceMesh, rest: dict) -> None:
    """A sparse block is a grouped-query block with an indexer, whose loss needs all heads."""
    changes = {"layer_pattern": "A", "depth": 3, "dsa": DSAConfig(ranks=(1, 3), heads=2, width=8, top_k=8)}
    model = build(preset("nam12", "narrow", **changes, **rest))
    if rest:
        with pytest.raises(ContractError, match="nam12 has no attention block whose heads can be divided"):
            shard_attention(model, mesh)
    else:
        assert shard_attention(model, mesh) == 1
    divided = {
        kind
        for kind, block in zip(model.config.kinds, model.blocks)
        if any(isinstance(parameter, DTensor) for parameter in block.parameters())
    }
    assert divided == (set() if rest else {"A:gqa"})
