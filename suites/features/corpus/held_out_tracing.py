"""Held-out cases: Python semantics, control flow, checkpoints, guards and caches."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bumpgate.plugin.instruments import cache_counts
from suites.features.corpus.case import compiled_differs, differences, one_graph, regression


@regression("tracing", 152262, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def reversed_exhausted() -> list[str]:
    """A reversed iterator that list() has consumed yields its entries a second time."""

    def probed(x: Tensor) -> Tensor:
        layers = reversed([1, 2, 3])
        list(layers)
        try:
            next(layers)
        except StopIteration:
            return x + 1
        return x - 1

    return compiled_differs(probed, torch.zeros(2), backend="eager")


@regression(
    "tracing",
    149037,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
    error="Cannot construct `ConstantVariable`",
)
def generator_return() -> list[str]:
    """yield from loses the value that the inner generator returns."""

    def inner() -> Iterator[int]:
        yield 1
        return 5

    def outer() -> Iterator[int]:
        returned = yield from inner()
        yield 2 if returned == 5 else 3

    def visited(x: Tensor) -> Tensor:
        for n in outer():
            x = x * 10 + n
        return x

    return compiled_differs(visited, torch.zeros(2), backend="eager")


@regression(
    "tracing",
    None,
    bad="2.8.0 2.9.0 2.10.0",
    good="2.11.0 2.12.0 2.13.0 2.14.1 2.15.0",
    error="is not iterable",
)
def match_with_rest() -> list[str]:
    """A match statement with a starred rest inside a mapping does not compile."""

    def matched(x: Tensor, config: dict[str, list[int]]) -> Tensor:
        match config:
            case {"layers": [first, *rest]}:
                return x + first + len(rest)
            case _:
                return x

    return one_graph(matched, torch.zeros(2), {"layers": [1, 2, 3]})


@regression(
    "tracing",
    None,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0",
    good="2.13.0 2.14.1 2.15.0",
    error="zip() has one argument of len differing from others",
)
def zip_strict() -> list[str]:
    """The ValueError of zip(strict=True) cannot be caught in a compiled function."""

    def probed(x: Tensor) -> Tensor:
        try:
            list(zip([1], [1, 2], strict=True))
        except ValueError:
            return x + 1
        return x

    return one_graph(probed, torch.zeros(2))


class Expert(enum.IntEnum):
    DENSE = 1
    ROUTED = 2


@regression("tracing", None, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def enum_members() -> list[str]:
    """A function that iterates over an enumeration does not compile to one graph."""
    return one_graph(lambda x: x + sum(expert for expert in Expert), torch.zeros(2))


@regression("tracing", None, bad="2.8.0 2.9.0 2.10.0", good="2.11.0 2.12.0 2.13.0 2.14.1 2.15.0")
def suppress() -> list[str]:
    """A function that suppresses an exception by contextlib.suppress does not compile to one graph."""

    def looked_up(x: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            x = x + {"scale": 2}["bias"]
        return x + 1

    return one_graph(looked_up, torch.zeros(2))


@regression("tracing", 184340, bad="2.8.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def index_error() -> list[str]:
    """The IndexError of an operator with a wrong dimension comes as another type out of a compiled function."""
    compiled = torch.compile(lambda x: torch.softmax(x, dim=10))
    try:
        compiled(torch.randn(4))
    except IndexError:
        return []
    except RuntimeError as error:
        if "Dimension out of range" not in str(error):
            raise
        return [f"{type(error).__name__}, expected IndexError"]
    return ["no error, expected IndexError"]


class Block(nn.Module):
    """A residual norm; the checkpointed calls share its epsilon, a Python float."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-5)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.norm(x)
        return x if context is None else x + context


@regression(
    "checkpoint",
    193194,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
    error="lift_tracked_freevar_to_input",
)
def shared_float() -> list[str]:
    """A module with a float attribute cannot be checkpointed at two places of one graph with dynamic shapes."""
    block = Block()

    def twice(x: Tensor, context: Tensor) -> Tensor:
        x = checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, context, use_reentrant=False)

    x, context = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    return compiled_differs(twice, x, context, backend="aot_eager", dynamic=True)


@regression("checkpoint", 182594, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def unused_keyword() -> list[str]:
    """A checkpointed function is compiled for each value of a keyword argument that it does not use."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def checkpointed(x: Tensor, name: str) -> Tensor:
        return checkpoint(lambda x, **_: x.sin(), x, use_reentrant=False, name=name)

    compiled = torch.compile(checkpointed, backend=backend)
    for name in ("first", "second", "third"):
        compiled(torch.randn(3, requires_grad=True), name)
    return [] if len(graphs) == 1 else [f"{len(graphs)} graphs, expected 1"]


@regression("control_flow", 195327, bad="2.13.0 2.14.1", good="2.15.0")
def condition_updates_state() -> list[str]:
    """An update of a captured tensor by the condition of while_loop is lost, if the tensor was updated before."""

    def counted(state: Tensor) -> Tensor:
        state.add_(1)

        def unfinished(n: Tensor) -> Tensor:
            state.add_(10)
            return n < 2

        torch.while_loop(unfinished, lambda n: (n + 1,), (torch.zeros((), dtype=torch.int64),))
        return state.clone()

    state = torch.zeros(2)
    with torch.no_grad():
        result = torch.compile(counted)(state)
    expected = torch.full((2,), 31.0)
    return differences("result and state", [expected, expected], [result, state])


class Projected(nn.Module):
    """A region that reads the transposed view of a buffer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(4, 4))

    @torch.compiler.nested_compile_region
    def project(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.project(x))


@regression(
    "control_flow",
    191785,
    bad="2.12.0 2.13.0",
    good="2.8.0 2.9.0 2.10.0 2.11.0 2.14.1 2.15.0",
    error="Freevar has no source",
)
def region_transposes_buffer() -> list[str]:
    """A nested compile region that reads the transposed view of a buffer does not compile."""
    module, x = Projected(), torch.randn(3, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    transposed = module.weight.T
    return differences("output", x @ transposed @ transposed, compiled(x))


@regression("shapes", 194976, bad="2.8.0 2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def float_limit() -> list[str]:
    """A float limit that changes between the calls of a compiled clamp keeps an earlier value."""

    def swiglu(x: Tensor, limit: float) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)

    compiled, x = torch.compile(swiglu), torch.linspace(-8, 8, 32).view(2, 16).requires_grad_()
    lines = []
    for limit in (1.0, 2.0, 3.0):
        expected, found = swiglu(x, limit), compiled(x, limit)
        gradients = [torch.autograd.grad(y.sum(), x) for y in (expected, found)]
        lines += differences(f"limit {limit}", expected, found)
        lines += differences(f"gradient for limit {limit}", *gradients)
    return lines


@regression("cache", 191106, bad="2.12.0 2.13.0", good="2.8.0 2.11.0 2.14.1 2.15.0")
def autocast_region() -> list[str]:
    """A graph with an autocast region is not cached."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    before = cache_counts().aot_bypass or 0
    torch.compile(product)(torch.randn(4, 4), torch.randn(4, 4))
    bypasses = (cache_counts().aot_bypass or 0) - before
    return [f"{bypasses} bypasses of the cache, expected 0"] if bypasses else []
