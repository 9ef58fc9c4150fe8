"""What Dynamo traces wrongly or no longer traces: Python, flex_attention, regions, scan and symbolic sizes."""

from __future__ import annotations

import contextvars
import copy
import heapq
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from suites.features.corpus.case import compiled_differs, differences, one_graph, regression


@regression("tracing", 190755, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def foreign_method_descriptor() -> list[str]:
    """A method of another class as a class attribute binds in a compiled function, where eager raises TypeError."""

    class Borrower:
        append = list.append

    def probed(x: Tensor) -> Tensor:
        try:
            Borrower().append  # noqa: B018
        except TypeError:
            return x + 2
        return x + 1

    return compiled_differs(probed, torch.zeros(2), backend="eager")


@regression("tracing", 186671, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def set_subclass() -> list[str]:
    """A set compares equal by the __iter__ of its subclass in a compiled function, not by its entries."""

    class Experts(set[int]):
        def __iter__(self):
            return iter([99])

    def same(x: Tensor, chosen: set[int], expected: set[int]) -> Tensor:
        return x + 1 if chosen == expected else x - 1

    return compiled_differs(same, torch.zeros(2), {1, 2}, Experts({1, 2}), backend="eager")


@regression("tracing", None, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.14.1 2.15.0", good="2.13.0")
def state_dict() -> list[str]:
    """A function that reads a module's state_dict() no longer compiles to one graph."""
    layer = torch.nn.Linear(3, 3)

    def tied(x: Tensor) -> Tensor:
        return x @ layer.state_dict()["weight"]

    return one_graph(tied, torch.ones(2, 3))


class Doubled(torch.Tensor):
    """A tensor whose sums come out doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.add and isinstance(result, Tensor) else result


@regression("tracing", 176679, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def torch_function_subclass() -> list[str]:
    """A compiled operator of a __torch_function__ subclass applies the override twice."""
    a, b = (torch.tensor([value]).as_subclass(Doubled) for value in (1.0, 3.0))

    def add(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y)

    found = torch.compile(add, backend="eager")(a, b)
    return differences("output", add(a, b).as_subclass(Tensor), found.as_subclass(Tensor))


@regression("tracing", 175855, bad="2.9.0", good="2.8.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0")
def list_changed_in_loop() -> list[str]:
    """A loop over a list that removes entries from it visits entries that eager skips."""

    def visited(x: Tensor) -> Tensor:
        numbers = [1, 2, 3, 4]
        for n in numbers:
            if n % 2 == 0:
                numbers.remove(n)
            x = x * 10 + n
        return x

    return compiled_differs(visited, torch.zeros(2), backend="eager")


@regression("tracing", None, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def simple_namespace() -> list[str]:
    """A function that makes a SimpleNamespace does not compile to one graph."""

    def scaled(x: Tensor) -> Tensor:
        return x * SimpleNamespace(scale=2).scale

    return one_graph(scaled, torch.ones(2))


@regression("tracing", None, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def heap() -> list[str]:
    """A function that pushes and pops a heap does not compile to one graph."""

    def smallest(x: Tensor) -> Tensor:
        queue = [1, 3]
        heapq.heappush(queue, 0)
        return x + heapq.heappop(queue)

    return one_graph(smallest, torch.ones(2))


@regression("tracing", 196467, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def tensor_of_size() -> list[str]:
    """torch.Tensor(size) has the sizes as its data in a compiled function, where eager makes a tensor of that size."""

    def scratch(x: Tensor) -> Tensor:
        return torch.Tensor(x.size())

    found = torch.compile(scratch, backend="eager")(torch.ones(1, 4))
    return [] if found.shape == (1, 4) else [f"shape {tuple(found.shape)}, expected (1, 4)"]


@regression("tracing", 194763, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def no_grad_method() -> list[str]:
    """A no_grad method of an object made inside a compiled function does not compile to one graph."""

    class Sampler:
        @torch.no_grad()
        def draw(self, x: Tensor) -> Tensor:
            return x + 1

    def drawn(x: Tensor) -> Tensor:
        return Sampler().draw(x)

    return one_graph(drawn, torch.ones(2))


@regression("tracing", None, bad="2.15.0", good="2.11.0 2.12.0 2.13.0 2.14.1")
def class_property() -> list[str]:
    """isinstance ignores the __class__ property of an object made inside a compiled function."""

    class Proxy:
        @property
        def __class__(self):
            return int

    def scaled(x: Tensor) -> Tensor:
        return x + 1 if isinstance(Proxy(), int) else x - 1

    return compiled_differs(scaled, torch.ones(2), backend="eager")


SCALE = contextvars.ContextVar("SCALE", default=3)


@regression("tracing", 186449, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def context_variable() -> list[str]:
    """A function that reads a context variable does not compile to one graph."""

    def scaled(x: Tensor) -> Tensor:
        return x * SCALE.get()

    return one_graph(scaled, torch.ones(2))


@regression("tracing", 115122, bad="2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def deepcopy() -> list[str]:
    """A function that copies a dictionary by deepcopy does not compile to one graph."""

    def scaled(x: Tensor) -> Tensor:
        return x * copy.deepcopy({"scales": [1, 2]})["scales"][1]

    return one_graph(scaled, torch.ones(2))


# B batch, H heads, T tokens, P head dim.
B, H, T, P = 1, 4, 13, 16


@regression(
    "attention",
    182606,
    bad="2.8.0 2.9.0",
    good="2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0",
    error="id() with unsupported args",
)
def mask_of_a_derived_position() -> list[str]:
    """A block mask that closes over position + 1 cannot be built inside a compiled decode step."""

    def step(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        end = position + 1

        def visible(b, h, i, j):
            return (j >= 0) & (j <= end)

        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    q, k, v = torch.randn(B, H, 1, P), torch.randn(B, H, T, P), torch.randn(B, H, T, P)
    return [
        line
        for position in (5, 7)
        for line in differences("output", step(q, k, v, position), compiled(q, k, v, position))
    ]


@regression("control_flow", 184528, bad="2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def scan_gradient() -> list[str]:
    """The gradient of a scan leaves out what passes through the carry, if the first carry requires none."""
    from suites.support.instruments import scan  # some of the instruments do not import on torch 2.8

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry * 0.5 + x, carry * x

    def looped(xs: Tensor) -> Tensor:
        carry, outputs = torch.ones(3), []
        for x in xs:
            carry, y = step(carry, x)
            outputs.append(y)
        return torch.stack(outputs)

    def scanned(xs: Tensor) -> Tensor:
        return scan(step, torch.ones(3), xs)[1]

    xs = torch.randn(5, 3, requires_grad=True)
    compiled = torch.compile(scanned, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(run(xs).sum(), xs)[0] for run in (looped, compiled)]
    return differences("gradient", *gradients)


state = torch.tensor(0)


@regression("control_flow", 191821, bad="2.12.0 2.13.0", good="2.11.0 2.14.1 2.15.0")
def region_reads_global() -> list[str]:
    """A nested compile region that is called twice reads the first value of a global that changed in between."""

    @torch.compiler.nested_compile_region
    def incremented() -> Tensor:
        return state + 1

    def twice(x: Tensor) -> Tensor:
        global state
        for _ in range(2):
            state = x
            x = incremented()
        return x

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    return differences("output", torch.tensor(2), compiled(torch.tensor(0)))


@regression(
    "shapes", 181870, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0", error="numel"
)
def weighted_soft_targets() -> list[str]:
    """cross_entropy with class weights and soft targets cannot be traced with dynamic shapes."""

    def loss(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=weight, reduction="none")

    operands = torch.randn(3, 5), torch.rand(3, 5).softmax(1), torch.rand(5)
    return compiled_differs(loss, *operands, backend="eager", dynamic=True)


@regression(
    "shapes", 179383, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0", error="numel"
)
def quantile() -> list[str]:
    """quantile cannot be traced with dynamic shapes."""
    backend = "aot_eager_decomp_partition"
    return compiled_differs(
        lambda x: torch.quantile(x, 0.5), torch.arange(5.0), backend=backend, dynamic=True
    )


@regression(
    "shapes",
    185715,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
    error="NYI SymInt equality",
)
def power_of_symbol() -> list[str]:
    """The gradient of a power with a symbolic integer exponent ends in an internal assertion."""

    def power(x: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
        y = torch.pow(x, exponent)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), gradient

    x = torch.ones(1, 3, requires_grad=True)
    return differences("output", power(x, 0), torch.compile(power, backend="aot_eager", dynamic=True)(x, 0))
