"""The programs of one of two ranks; each returns numbers for JSON.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config
from launch.contract import load
from launch.dist import parallel, process_group
from launch.dist.parallel import average_buffers, parallelize
from launch.dist.ranks import Ranks
from launch.dist.shards import whole
from launch.retry import load_retry
from model import Hybrid, HybridConfig, preset
from suites.support.hybrids import build, token_batch
from suites.support.instruments import flight_record, functional_all_reduce, functional_argument

TOKENS = 32
WATCHED = 10.0
SEEDS = (1, 2)  # of each rank's batch


class Branched(nn.Module):
    """A block and a parallel branch that runs only if this rank's batch uses it."""

    def __init__(self, block: nn.Module, config: HybridConfig, uses_side: bool) -> None:
        super().__init__()
        self.block, self.side, self.uses_side = block, nn.Linear(config.d_model, config.d_model), uses_side

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D) -> (B,T,D)."""
        y = self.block(x, doc_ids, positions)
        return y + self.side(x) if self.uses_side else y


def model_of(config: HybridConfig, rank: int, branch: bool, device: str) -> Hybrid:
    """Return the seeded model of `rank`: its branch, if any, is used on rank 0 only."""
    model = build(config)
    if branch:
        model.blocks[0] = Branched(model.blocks[0], config, uses_side=rank == 0)
    return model.to(device)


def alone(
    config: HybridConfig, branch: bool, device: str
) -> tuple[dict[str, Tensor], list[int], dict[str, Tensor]]:
    """Run one eager process; return mean gradients (a missing one counts as 0), overflows, mean buffers."""
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    overflows = []
    for rank, seed in enumerate(SEEDS):
        model = model_of(config, rank, branch, device)
        model(token_batch(config, 1, TOKENS, seed, device)).backward()
        for name, p in model.named_parameters():
            share = torch.zeros_like(p) if p.grad is None else p.grad / len(SEEDS)
            gradients[name] = gradients.get(name, 0) + share
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffers[name] = buffers.get(name, 0) + buffer / len(SEEDS)
        overflows.append(model.overflow())
    return gradients, overflows, buffers


def gradients(ranks: Ranks, style: str, policy: str, branch: bool, unused: bool) -> dict[str, Any]:
    """Compare one forward and backward of the narrow nam12 under `style` with a single process, bitwise."""
    config, rank, device = preset("nam12", "narrow"), ranks.rank, str(ranks.device)
    expected, _, _ = alone(config, branch, device)
    with DynamoWatch() as watch:
        made = parallelize(
            model_of(config, rank, branch, device),
            load(),
            init_device_mesh(ranks.device.type, (2,)),
            style,
            policy,
            backend=watch.backend("aot_eager"),
            unused=unused,
        )
        made.compiled(token_batch(config, 1, TOKENS, SEEDS[rank], device)).backward()
    found = {name: whole(p.grad) for name, p in made.compiled.model.named_parameters()}
    other = [
        name
        for name, reference in expected.items()
        if found[name] is None or not torch.equal(found[name], reference)
    ]
    report = watch.report
    return {
        "tensors": len(expected),
        "zero": sum(not reference.any() for reference in expected.values()),
        "different": len(other),
        "names": other[:5],
        "branch": branch,
        "order": made.order,
        "graphs": report.unique_graphs,
        "calls": report.calls,
        "breaks": report.counted_breaks,
    }


def buffers(ranks: Ranks, synced: bool) -> dict[str, Any]:
    """Run two forwards under DDP with a moving selection bias. synced: with DDP's own broadcast of rank 0's buffers."""
    config = preset("nam12", "narrow", depth=4, bias_rate=0.01)
    device = str(ranks.device)
    _, overflows, means = alone(config, branch=False, device=device)
    if synced:
        parallel._own_buffers = dict
    mesh = init_device_mesh(ranks.device.type, (2,))
    made = parallelize(build(config, device), load(), mesh, "ddp", "eager")
    model, ids = made.compiled.model, token_batch(config, 1, TOKENS, SEEDS[ranks.rank], device)
    made.compiled(ids).backward()
    average_buffers(model)
    now = dict(model.named_buffers())
    apart = [name for name, mean in means.items() if not torch.equal(now[name], mean)]
    total = parallel.overflow(model)
    made.compiled(ids)  # the broadcast comes with a forward, before anything is counted
    return {
        "buffers": len(means),
        "apart": apart,
        "total": total,
        "alone": overflows[ranks.rank],
        "after_two": model.overflow(),
        "saved": [name for name in model.state_dict() if name.endswith("overflow")],
    }


def completed_record(device: torch.device) -> bytes:
    """Return the flight record: NCCL's once each collective is completed in it, or after WATCHED seconds.

    NCCL's watchdog writes the states, some time after the collectives: of two ranks one may still have a scheduled one.
    On gloo all stay scheduled.
    """
    end = time.monotonic() + (WATCHED if device.type == "cuda" else 0.0)
    while True:
        record = flight_record(device.type)
        states = {entry["state"] for entry in pickle.loads(record)["entries"]}
        if states <= {"completed"} or time.monotonic() > end:
            return record
        time.sleep(0.1)


def collectives(ranks: Ranks, dumps: str, backend: str = "aot_eager") -> dict[str, Any]:
    """Compare compiled with eager, and groups as arguments; then write a flight record of two groups to `dumps`."""
    rank = ranks.rank
    device = ranks.device
    x = torch.linspace(-2, 2, 8, device=device) * (rank + 1)
    world, further = functional_argument(dist.group.WORLD), dist.new_group([0, 1])

    def scatter(x: Tensor) -> Tensor:
        part = torch.empty(4, device=x.device)
        dist.reduce_scatter_tensor(part, x.sin())
        return part * 2

    def functional(x: Tensor, group: dist.ProcessGroup | str) -> Tensor:
        return functional_all_reduce(x.cos(), group) * 2

    def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "scatter": scatter,
        "functional": lambda x: functional(x, world),
    }
    with suppress(ValueError):  # before torch 2.13, of the versions tried, an op's schema cannot have a group
        op = torch.library.custom_op("bumpgate_ranks::summed", summed, mutates_args=())
        op.register_fake(lambda x, group: torch.empty_like(x))
        cases["op"] = lambda x: op(x, further) + 1
    if "op" not in cases:
        dist.all_reduce(x.clone(), group=further)  # the flight record has both groups
    expected = {name: case(x) for name, case in cases.items()}
    with DynamoWatch() as watch:
        options = {"backend": watch.backend(backend), "fullgraph": True}
        compiled = {name: torch.compile(case, **options)(x) for name, case in cases.items()}
    # The expected sum: two ranks that both did nothing would agree with each other.
    sums = sum((torch.linspace(-2, 2, 8, device=device) * scale).sin() for scale in (1, 2))
    by_hand = sums[4 * rank : 4 * rank + 4] * 2
    Path(dumps, f"rank_{rank}").write_bytes(completed_record(device))
    return {
        "equal": {name: torch.equal(found, expected[name]) for name, found in compiled.items()},
        "by_hand": torch.allclose(expected["scatter"], by_hand),
        "graphs": watch.report.unique_graphs,
        "operators": [name for graph in watch.report.graphs for name in graph.operators],
    }


def divergent(ranks: Ranks, diverge: bool) -> dict[str, Any]:
    """Run a compiled function that enters a collective only for long inputs, which rank 1 does not have."""

    def step(x: Tensor) -> Tensor:
        y = x.sin()
        if x.shape[0] > 4:
            dist.all_reduce(y)
        return y.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    length = 4 if diverge and ranks.rank else 8
    return {"sum": float(compiled(torch.ones(length, device=ranks.device)))}


def skewed(ranks: Ranks, collectives: bool) -> dict[str, Any]:
    """Add up a compiled sum three times; rank 0 compiles it for a new length in each step."""
    with dynamo_config({"enable_compiler_collectives": collectives}), DynamoWatch() as watch:
        compiled = torch.compile(lambda x: x.sin().sum(), backend=watch.backend("eager"))
        for step in range(3):
            dist.all_reduce(compiled(torch.ones(2 if ranks.rank else 2 + step)))
    return {"graphs": watch.report.unique_graphs}


def passes_barrier(ranks: Ranks, expert: bool) -> dict[str, Any]:
    """Start a group of which rank 1 never reaches the barrier: it waits for a sign that rank 0 is past it."""
    dist.destroy_process_group()
    place = {"store": ranks.store, "rank": ranks.rank, "world_size": 2}
    if not ranks.rank:
        process_group.start(load(), load_retry(), "gloo", expert_parallel=expert, **place)
        ranks.store.set("passed", "1")
        return {}
    dist.init_process_group("gloo", **place)
    try:
        ranks.store.wait(["passed"], timedelta(seconds=2))
    except dist.DistError:
        os._exit(7)  # rank 0 must not wait for its timeout
    return {}


def outlived(ranks: Ranks, place: str, referenced: bool) -> dict[str, Any]:
    """Drop a DDP whose gloo group was destroyed, while a collective of the group waits for the other rank.

    referenced: Python references the group until DDP is gone. place: a file to which the stages are written.
    """
    stages = Path(f"{place}-{ranks.rank}")
    group: Any = dist.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    ranks.meet()
    if ranks.rank:
        time.sleep(1)  # rank 0 drops its model meanwhile
        dist.all_reduce(torch.ones(4), group=group)
        return {"stages": ""}
    dist.all_reduce(torch.ones(4), group=group, async_op=True)
    dist.destroy_process_group(group)
    kept = [group] if referenced else []
    del group
    stages.write_text("dropping the model")
    del model
    stages.write_text("dropped the model")
    kept.clear()
    return {"stages": stages.read_text()}
