"""Python that Dynamo traces wrongly, or no longer traces into one graph."""

from __future__ import annotations

import contextvars
import copy
import heapq
from types import SimpleNamespace

import torch
from torch import Tensor

from suites.features.corpus.case import compiled_differs, differences, one_graph, regression


@regression(
    "tracing-foreign_method_descriptor",
    "A method of another class as a class attribute binds in a compiled function, where eager raises TypeError",
    issue=190755,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
)
def foreign_method_descriptor() -> list[str]:
    class Borrower:
        append = list.append

    def probed(x: Tensor) -> Tensor:
        try:
            Borrower().append  # noqa: B018
        except TypeError:
            return x + 2
        return x + 1

    return compiled_differs(probed, torch.zeros(2), backend="eager")


@regression(
    "tracing-set_subclass",
    "A set compares equal by the __iter__ of its subclass in a compiled function, not by its entries",
    issue=186671,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
)
def set_subclass() -> list[str]:
    class Experts(set[int]):
        def __iter__(self):
            return iter([99])

    def same(x: Tensor, chosen: set[int], expected: set[int]) -> Tensor:
        return x + 1 if chosen == expected else x - 1

    return compiled_differs(same, torch.zeros(2), {1, 2}, Experts({1, 2}), backend="eager")


@regression(
    "tracing-state_dict",
    "A function that reads a module's state_dict() no longer compiles to one graph",
    issue=None,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.14.1 2.15.0",
    good="2.13.0",
)
def state_dict() -> list[str]:
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


@regression(
    "tracing-torch_function_subclass",
    "A compiled operator of a __torch_function__ subclass applies the override twice",
    issue=176679,
    bad="2.8.0 2.9.0 2.10.0 2.11.0",
    good="2.12.0 2.13.0 2.14.1 2.15.0",
)
def torch_function_subclass() -> list[str]:
    a, b = (torch.tensor([value]).as_subclass(Doubled) for value in (1.0, 3.0))

    def add(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y)

    found = torch.compile(add, backend="eager")(a, b)
    return differences("output", add(a, b).as_subclass(Tensor), found.as_subclass(Tensor))


@regression(
    "tracing-list_changed_in_loop",
    "A loop over a list that removes entries from it visits entries that eager skips",
    issue=175855,
    bad="2.9.0",
    good="2.8.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0",
)
def list_changed_in_loop() -> list[str]:
    def visited(x: Tensor) -> Tensor:
        numbers = [1, 2, 3, 4]
        for n in numbers:
            if n % 2 == 0:
                numbers.remove(n)
            x = x * 10 + n
        return x

    return compiled_differs(visited, torch.zeros(2), backend="eager")


@regression(
    "tracing-simple_namespace",
    "A function that makes a SimpleNamespace does not compile to one graph",
    issue=None,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def simple_namespace() -> list[str]:
    def scaled(x: Tensor) -> Tensor:
        return x * SimpleNamespace(scale=2).scale

    return one_graph(scaled, torch.ones(2))


@regression(
    "tracing-heap",
    "A function that pushes and pops a heap does not compile to one graph",
    issue=None,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def heap() -> list[str]:
    def smallest(x: Tensor) -> Tensor:
        queue = [1, 3]
        heapq.heappush(queue, 0)
        return x + heapq.heappop(queue)

    return one_graph(smallest, torch.ones(2))


@regression(
    "tracing-tensor_of_size",
    "torch.Tensor(size) has the sizes as its data in a compiled function, where eager makes a tensor of that size",
    issue=196467,
    bad="2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def tensor_of_size() -> list[str]:
    def scratch(x: Tensor) -> Tensor:
        return torch.Tensor(x.size())

    found = torch.compile(scratch, backend="eager")(torch.ones(1, 4))
    return [] if found.shape == (1, 4) else [f"shape {tuple(found.shape)}, expected (1, 4)"]


@regression(
    "tracing-no_grad_method",
    "A no_grad method of an object made inside a compiled function does not compile to one graph",
    issue=194763,
    bad="2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def no_grad_method() -> list[str]:
    class Sampler:
        @torch.no_grad()
        def draw(self, x: Tensor) -> Tensor:
            return x + 1

    def drawn(x: Tensor) -> Tensor:
        return Sampler().draw(x)

    return one_graph(drawn, torch.ones(2))


@regression(
    "tracing-class_property",
    "isinstance ignores the __class__ property of an object made inside a compiled function",
    issue=None,
    bad="2.15.0",
    good="2.11.0 2.12.0 2.13.0 2.14.1",
)
def class_property() -> list[str]:
    class Proxy:
        @property
        def __class__(self):
            return int

    def scaled(x: Tensor) -> Tensor:
        return x + 1 if isinstance(Proxy(), int) else x - 1

    return compiled_differs(scaled, torch.ones(2), backend="eager")


SCALE = contextvars.ContextVar("SCALE", default=3)


@regression(
    "tracing-context_variable",
    "A function that reads a context variable does not compile to one graph",
    issue=186449,
    bad="2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
)
def context_variable() -> list[str]:
    def scaled(x: Tensor) -> Tensor:
        return x * SCALE.get()

    return one_graph(scaled, torch.ones(2))


@regression(
    "tracing-deepcopy",
    "A function that copies a dictionary by deepcopy does not compile to one graph",
    issue=115122,
    bad="2.11.0",
    good="2.12.0 2.13.0 2.14.1 2.15.0",
)
def deepcopy() -> list[str]:
    def scaled(x: Tensor) -> Tensor:
        return x * copy.deepcopy({"scales": [1, 2]})["scales"][1]

    return one_graph(scaled, torch.ones(2))
