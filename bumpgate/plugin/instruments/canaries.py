"""Canaries: tiny programs with a known count, one per instrument, run before any row may rely on it.

A canary that disagrees means that the instrument broke (a renamed counter, a moved log, Dynamo switched off), not the
product. Its rows become INSTRUMENT, never PASS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bumpgate.plugin import instruments as device
from bumpgate.plugin.instruments.work import count_work

STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}


class CanaryError(AssertionError):
    """A canary read something other than its known count. The message is one line."""


def expect(what: str, measured: object, known: object) -> None:
    """Raise CanaryError if a reading differs from the known value."""
    if measured != known:
        raise CanaryError(f"{what}: read {measured!r}, known {known!r} (torch {torch.__version__})")


def graphs() -> None:
    """One function called twice: 1 graph of 2 operators, 2 compiled calls, 1 frame tried and 1 compiled."""
    with device.DynamoWatch() as watch:
        compiled = torch.compile(lambda x: x.sin().cos(), backend=watch.backend("eager"))
        compiled(torch.ones(4))
        compiled(torch.ones(4))
    r = watch.report
    expect(
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
    expect("breaks", len(breaks), 1)
    expect("counters['graph_break']", watch.report.counted_breaks, 1)
    expect("call site", breaks[0].site, f"instruments/canaries.py:{_prints.__code__.co_firstlineno + 2}")
    expect("registry id", breaks[0].code[:2] + str(breaks[0].code[2:].isdigit()), "GBTrue")


def recompiles() -> None:
    """Two sizes under static shapes: exactly 1 recompile, whose guard names the size."""
    with device.DynamoWatch() as watch, device.dynamo_config(STATIC):
        compiled = torch.compile(lambda x: x.sin(), backend=watch.backend("eager"))
        compiled(torch.ones(4))
        compiled(torch.ones(5))
    found = watch.report.recompiles
    expect("recompiles", len(found), 1)
    expect("the guard names the size", "size mismatch" in found[0].guard, True)


def recompile_limit() -> None:
    """Four sizes at a limit of 2: 2 graphs, and the silent fallback to eager is reported as a failure."""
    limits = {**STATIC, "recompile_limit": 2}
    with device.DynamoWatch() as watch, device.dynamo_config(limits):
        compiled = torch.compile(lambda x: x.sin(), backend=watch.backend("eager"))
        for size in (4, 5, 6, 7):
            compiled(torch.ones(size))
    expect("graphs at a limit of 2", watch.report.unique_graphs, 2)
    expect("the limit hit is a failure", len(watch.report.failures) > 0, True)


def guards() -> None:
    """More parameters, more guards: the count is positive and grows. Two graphs have more than either alone."""

    def count(*layers: int) -> int:
        with device.DynamoWatch() as watch:
            for depth in layers:
                net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
                torch.compile(net, backend=watch.backend("eager"))(torch.ones(1, 4))
        return watch.report.guards

    few, many, both = count(1), count(4), count(1, 4)
    expect(f"guard counts grow ({few}, {many}, {both})", 0 < few < many < both, True)


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
    expect("islands in a compiled call", dict(tally), {"_Disabled": 1})
    with device.eager_islands(blocks) as tally:
        blocks[2](blocks[1](blocks[0](torch.ones(4))))
    expect("islands in an eager call", dict(tally), {"_Disabled": 1, "_Visible": 2})


def inductor() -> None:
    """One fused pointwise kernel: 1 kernel, 8 bytes per fp32 element, and a hash that distinguishes programs."""

    def measure(function: Callable[[Tensor], Tensor]) -> device.InductorReport:
        with device.DynamoWatch() as watch, device.inductor_report() as report:
            torch.compile(function, backend=watch.backend())(torch.ones(64))
        return report

    first, again, other = (measure(f) for f in (sin_cos, sin_cos, _cos_sin))
    expect("kernels, bytes, modules", (first.kernels, first.bytes_accessed, first.modules), (1, 512, 1))
    expect("the same program hashes alike", first.code_hash, again.code_hash)
    expect("another program hashes differently", first.code_hash != other.code_hash, True)


def sin_cos(x: Tensor) -> Tensor:
    """Two operators that Inductor fuses into one kernel."""
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
        device.reset_dynamo()
        torch.compile(function)(torch.ones(4, requires_grad=True)).sum().backward()
        return device.cache_counts()

    with device.empty_cache():
        cold, warm, opaque = run(sin_cos), run(sin_cos), run(_Opaque.apply)
    expect("cold AOT miss, hit", (cold.aot_miss, cold.aot_hit), (1, None))
    expect("cold FX misses (forward, backward)", cold.fx_miss, 2)
    expect("warm AOT hit, miss", (warm.aot_hit, warm.aot_miss), (1, None))
    expect("warm FX hits", warm.fx_hit, 2)
    expect("bypass of an autograd.Function", opaque.aot_bypass, 1)


def work() -> None:
    """A product of 4 x 8 and 8 x 2: 128 FLOPs, 224 bytes in fp32; its transpose is a view, which moves none."""
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    found = count_work(lambda: (a @ b).t())
    expect("FLOPs, bytes, operators", (found.flops, found.bytes, found.operators), (128, 224, 2))


CANARIES: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (graphs, graph_breaks, recompiles, recompile_limit, guards, islands, inductor, cache, work)
}


def prove(canaries: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Run canaries. Return name -> reason of a failure, empty if the canary agreed.

    Any exception counts as disagreement: an instrument that raises cannot measure.
    """
    results = {}
    for name, canary in canaries.items():
        try:
            canary()
            results[name] = ""
        except Exception as error:
            text = str(error)
            results[name] = f"{type(error).__name__}: {text.splitlines()[0] if text else repr(error)}"
        finally:
            device.reset_dynamo()
    return results
