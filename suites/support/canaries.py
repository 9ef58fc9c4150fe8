"""Canaries: tiny programs with a known count, one per instrument, run before any row may rely on it.

A canary that disagrees means that the instrument broke (a renamed counter, a moved log, Dynamo switched off), not the
product. Its rows become INSTRUMENT, never PASS.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
from torch import Tensor, nn

from suites.support import instruments as device

STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}


class CanaryError(AssertionError):
    """A canary read something other than its known count. The message is one line."""


def _expect(what: str, measured: object, known: object) -> None:
    if measured != known:
        raise CanaryError(f"{what}: read {measured!r}, known {known!r} (torch {torch.__version__})")


def graphs() -> None:
    """One function called twice: 1 graph of 2 operators, 2 compiled calls, 1 frame tried and 1 compiled."""
    with device.DynamoWatch() as watch:
        compiled = torch.compile(lambda x: x.sin().cos(), backend=watch.backend("eager"))
        compiled(torch.ones(4))
        compiled(torch.ones(4))
    r = watch.report
    _expect(
        "graphs, operators, calls, frames, frames_ok",
        (r.unique_graphs, r.graphs[0].ops if r.graphs else 0, r.calls, r.frames, r.frames_ok),
        (1, 2, 2, 1, 1),
    )


def _prints(x: Tensor) -> Tensor:
    y = x.sin()
    print(end="")
    return y.cos()


def graph_breaks() -> None:
    """A print between two operators: exactly 1 break, with a registry id and this file as its call site."""
    with device.DynamoWatch() as watch:
        torch.compile(_prints, backend=watch.backend("eager"))(torch.ones(4))
    breaks = watch.report.breaks
    _expect("breaks", len(breaks), 1)
    _expect("counters['graph_break']", watch.report.counted_breaks, 1)
    _expect("call site", breaks[0].site, f"support/canaries.py:{_prints.__code__.co_firstlineno + 2}")
    _expect("registry id", breaks[0].code[:2] + str(breaks[0].code[2:].isdigit()), "GBTrue")


def recompiles() -> None:
    """Two sizes under static shapes: exactly 1 recompile, whose guard names the size."""
    with device.DynamoWatch() as watch, device.dynamo_config(STATIC):
        compiled = torch.compile(lambda x: x.sin(), backend=watch.backend("eager"))
        compiled(torch.ones(4))
        compiled(torch.ones(5))
    found = watch.report.recompiles
    _expect("recompiles", len(found), 1)
    _expect("the guard names the size", "size mismatch" in found[0].guard, True)


def recompile_limit() -> None:
    """Four sizes at a limit of 2: 2 graphs, and the silent fallback to eager is reported as a failure."""
    limits = {**STATIC, "recompile_limit": 2}
    with device.DynamoWatch() as watch, device.dynamo_config(limits):
        compiled = torch.compile(lambda x: x.sin(), backend=watch.backend("eager"))
        for size in (4, 5, 6, 7):
            compiled(torch.ones(size))
    _expect("graphs at a limit of 2", watch.report.unique_graphs, 2)
    _expect("the limit hit is a failure", len(watch.report.failures) > 0, True)


def guards() -> None:
    """More parameters, more guards: the count is positive and grows."""

    def count(layers: int) -> int:
        with device.DynamoWatch() as watch:
            net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            torch.compile(net, backend=watch.backend("eager"))(torch.ones(1, 4))
        return watch.report.guards

    few, many = count(1), count(4)
    _expect(f"guard counts grow ({few}, {many})", 0 < few < many, True)


class _Disabled(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class _Visible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def islands() -> None:
    """Three blocks, one disabled: 1 eager island per call under compile, 3 without."""
    blocks = nn.ModuleList([_Visible(), _Disabled(), _Visible()])
    with device.DynamoWatch() as watch:
        compiled = torch.compile(lambda x: blocks[2](blocks[1](blocks[0](x))), backend=watch.backend("eager"))
        compiled(torch.ones(4))
        with device.eager_islands(blocks) as tally:
            compiled(torch.ones(4))
    _expect("islands in a compiled call", dict(tally), {"_Disabled": 1})
    with device.eager_islands(blocks) as tally:
        blocks[2](blocks[1](blocks[0](torch.ones(4))))
    _expect("islands in an eager call", dict(tally), {"_Disabled": 1, "_Visible": 2})


def host_syncs() -> None:
    """One .item(): exactly 1 host sync, and the profiler saw operators."""
    with device.host_syncs() as tally:
        torch.ones(4).sum().item()
    _expect("host syncs", tally["syncs"], 1)
    _expect("operators seen", tally["ops"] > 1, True)


def inductor() -> None:
    """One fused pointwise kernel: 1 kernel, 8 bytes per fp32 element, and a hash that distinguishes programs."""

    def measure(function: Callable[[Tensor], Tensor]) -> device.InductorReport:
        with device.DynamoWatch() as watch, device.inductor_report() as report:
            torch.compile(function, backend=watch.backend())(torch.ones(64))
        return report

    first, again, other = (measure(f) for f in (_sin_cos, _sin_cos, _cos_sin))
    _expect("kernels, bytes, modules", (first.kernels, first.bytes_accessed, first.modules), (1, 512, 1))
    _expect("the same program hashes alike", first.code_hash, again.code_hash)
    _expect("another program hashes differently", first.code_hash != other.code_hash, True)


def _sin_cos(x: Tensor) -> Tensor:
    return x.sin().cos()


def _cos_sin(x: Tensor) -> Tensor:
    return x.cos().sin()


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.sin()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


def cache() -> None:
    """An empty cache: 1 AOT miss, then after a reset 1 AOT hit. An autograd.Function in the graph is 1 bypass."""

    def run(function: Callable[[Tensor], Tensor]) -> device.CacheCounts:
        device.forget_graphs()
        torch.compile(function)(torch.ones(4, requires_grad=True)).sum().backward()
        return device.cache_counts()

    with device.empty_cache():
        cold, warm, opaque = run(_sin_cos), run(_sin_cos), run(_Opaque.apply)
    _expect("cold AOT miss, hit", (cold.aot_miss, cold.aot_hit), (1, None))
    _expect("cold FX misses (forward, backward)", cold.fx_miss, 2)
    _expect("warm AOT hit, miss", (warm.aot_hit, warm.aot_miss), (1, None))
    _expect("warm FX hits", warm.fx_hit, 2)
    _expect("bypass of an autograd.Function", opaque.aot_bypass, 1)


def compile_phases() -> None:
    """Forward and backward on an empty cache: CPU seconds in each of four phases, in all at most the CPU time used."""
    device.forget_graphs()
    before = device.cpu_seconds()
    with device.empty_cache(), device.compile_phases() as phases:
        torch.compile(_sin_cos)(torch.ones(4, requires_grad=True)).sum().backward()
    used = device.cpu_seconds() - before
    _expect("phases without a time", [name for name, x in vars(phases).items() if x is None], [])
    _expect("the phases' sum is at most the CPU time used", sum(vars(phases).values()) <= used, True)
    with device.compile_phases() as idle:
        torch.compile(_sin_cos)(torch.ones(4, requires_grad=True)).sum().backward()
    _expect("phases of a compiled call", set(vars(idle).values()), {None})


def cuda_graph_skips() -> None:
    """A graph that mutates its input is 1 skip and a valid one is 0; on CPU every graph is skipped without a reason."""
    gpu = torch.cuda.is_available()
    x = torch.ones(64, device="cuda" if gpu else "cpu")

    def skips(function: Callable[[Tensor], Tensor]) -> device.GraphSkips:
        device.forget_graphs()
        with device.cuda_graph_skips() as found:
            torch.compile(function)(x)
        return found

    sound, writing = skips(_sin_cos), skips(lambda x: x.add_(1))
    _expect("skips of a sound graph and of one that writes", (sound.count, writing.count), (int(not gpu), 1))
    _expect("reasons", (len(sound.reasons), len(writing.reasons)), (0, int(gpu)))
    _expect("the reason names the write", "mutated inputs" in "".join(writing.reasons), gpu)


def op_definitions() -> None:
    """An op with only a body, and the same op after a fake and a backward are registered."""
    name = f"bumpgate_canary::op{len(device.op_definitions('bumpgate_canary'))}"
    op = torch.library.custom_op(name, torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    bare = device.op_definitions("bumpgate_canary")[name.split("::")[1]]
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g)
    whole = device.op_definitions("bumpgate_canary")[name.split("::")[1]]
    _expect(
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
    _expect("calls, eager and compiled", (eager["called"], later["called"]), (2, 1))


def autotune() -> None:
    """One benchmarked choice: the benchmark counter moves by exactly 1."""
    device.forget_graphs()
    device.benchmark_one_choice()
    _expect("benchmarks", device.autotune_count(), 1)


def group_timeout() -> None:
    """A one-rank group with a timeout of 123 s: its backend reads 123, and 77 after it is set to 77."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=123)
    )
    try:
        group = torch.distributed.group.WORLD
        _expect("timeout", device.group_timeout(group), 123.0)
        group.set_timeout(timedelta(seconds=77))
        _expect("timeout after set_timeout", device.group_timeout(group), 77.0)
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
        _expect("entries", [entry["profiling_name"] for entry in entries], ["gloo:all_reduce"] * 2)
    finally:
        torch.distributed.destroy_process_group()


CANARIES: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        graphs,
        graph_breaks,
        recompiles,
        recompile_limit,
        guards,
        islands,
        host_syncs,
        inductor,
        cache,
        compile_phases,
        cuda_graph_skips,
        autotune,
        op_definitions,
        op_calls,
        group_timeout,
        flight_record,
    )
}
_results: dict[str, str] = {}


def prove(names: Iterable[str], canaries: Mapping[str, Callable[[], None]] = CANARIES) -> dict[str, str]:
    """Run each named canary once in this process. Return name -> reason, empty if the canary agreed.

    Any exception counts as disagreement: an instrument that raises cannot measure.
    """
    for name in names:
        if name not in _results:
            try:
                canaries[name]()
                _results[name] = ""
            except Exception as error:
                _results[name] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
                )
            finally:
                device.forget_graphs()
    return {name: _results[name] for name in names}
