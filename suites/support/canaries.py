"""Canaries of the instruments that only this repository needs, next to those of bumpgate.plugin.instruments."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from bumpgate.plugin.instruments import canaries as plugin
from bumpgate.plugin.instruments import empty_cache, reset_dynamo
from bumpgate.plugin.instruments.canaries import expect, sin_cos
from suites.support import instruments as device


def host_syncs() -> None:
    """One .item(): exactly 1 host sync, and the profiler saw operators."""
    with device.host_syncs() as tally:
        torch.ones(4).sum().item()
    expect("host syncs", tally["syncs"], 1)
    expect("operators seen", tally["ops"] > 1, True)


def compile_phases() -> None:
    """Forward and backward on an empty cache: CPU seconds in each of four phases, in all at most the CPU time used."""
    reset_dynamo()
    before = device.cpu_seconds()
    with empty_cache(), device.compile_phases() as phases:
        torch.compile(sin_cos)(torch.ones(4, requires_grad=True)).sum().backward()
    used = device.cpu_seconds() - before
    expect("phases without a time", [name for name, x in vars(phases).items() if x is None], [])
    expect("the phases' sum is at most the CPU time used", sum(vars(phases).values()) <= used, True)
    with device.compile_phases() as idle:
        torch.compile(sin_cos)(torch.ones(4, requires_grad=True)).sum().backward()
    expect("phases of a compiled call", set(vars(idle).values()), {None})


def cuda_graph_skips() -> None:
    """A graph that mutates its input is 1 skip and a valid one is 0; on CPU every graph is skipped without a reason."""
    gpu = torch.cuda.is_available()
    x = torch.ones(64, device="cuda" if gpu else "cpu")

    def skips(function: Callable[[Tensor], Tensor]) -> device.GraphSkips:
        reset_dynamo()
        with device.cuda_graph_skips() as found:
            torch.compile(function)(x)
        return found

    valid, writing = skips(sin_cos), skips(lambda x: x.add_(1))
    expect("skips of a valid graph and of one that writes", (valid.count, writing.count), (int(not gpu), 1))
    expect("reasons", (len(valid.reasons), len(writing.reasons)), (0, int(gpu)))
    expect("the reason names the write", "mutated inputs" in "".join(writing.reasons), gpu)


def op_definitions() -> None:
    """An op with only a body, and the same op after a fake and a backward are registered."""
    name = f"bumpgate_canary::op{len(device.op_definitions('bumpgate_canary'))}"
    op = torch.library.custom_op(name, torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    bare = device.op_definitions("bumpgate_canary")[name.split("::")[1]]
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g)
    whole = device.op_definitions("bumpgate_canary")[name.split("::")[1]]
    expect(
        "fake, backward", (bare, whole), (device.OpDefinition(False, False), device.OpDefinition(True, True))
    )


def op_calls() -> None:
    """An op of tensors called twice eagerly, then once from a function that was compiled before: 2, then 1."""
    op = torch.library.custom_op(
        "bumpgate_canary::called", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    x = torch.ones(4)
    with device.op_calls("bumpgate_canary") as eager:
        op(op(x))
    compiled = torch.compile(lambda x: op(x.sin()), backend="aot_eager", fullgraph=True)
    compiled(x)
    with device.op_calls("bumpgate_canary") as later:
        compiled(x)
    op(x)  # after the block: not counted
    expect("calls, eager and compiled", (eager["called"], later["called"]), (2, 1))


def autotune() -> None:
    """One benchmarked choice: the benchmark counter moves by exactly 1."""
    reset_dynamo()
    device.benchmark_one_choice()
    expect("benchmarks", device.autotune_count(), 1)


def group_timeout() -> None:
    """A one-rank group with a timeout of 123 s: its backend reads 123, and 77 after it is set to 77."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=123)
    )
    try:
        group = torch.distributed.group.WORLD
        expect("timeout", device.group_timeout(group), 123.0)
        group.set_timeout(timedelta(seconds=77))
        expect("timeout after set_timeout", device.group_timeout(group), 77.0)
    finally:
        torch.distributed.destroy_process_group()


def flight_record() -> None:
    """Two collectives of one rank: exactly 2 more entries of that operator in the flight recorder."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        before = len(pickle.loads(device.flight_record())["entries"])
        for _ in range(2):
            torch.distributed.all_reduce(torch.ones(2))
        entries = pickle.loads(device.flight_record())["entries"][before:]
        expect("entries", [entry["profiling_name"] for entry in entries], ["gloo:all_reduce"] * 2)
    finally:
        torch.distributed.destroy_process_group()


# No row of the suites counts work.
SHARED = {name: canary for name, canary in plugin.CANARIES.items() if name != "work"}
CANARIES: dict[str, Callable[[], None]] = SHARED | {
    f.__name__: f
    for f in (
        host_syncs,
        compile_phases,
        cuda_graph_skips,
        autotune,
        op_definitions,
        op_calls,
        group_timeout,
        flight_record,
    )
}
