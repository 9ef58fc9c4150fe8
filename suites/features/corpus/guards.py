"""State that a compiled function reads or writes: a missing guard or a lost write is a stale or wrong result."""

from __future__ import annotations

import torch
from torch import Tensor

from suites.features.corpus.case import compiled_differs, differences, regression


@regression("guards", 176851, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def class_attribute() -> list[str]:
    """A changed number on a class does not recompile the function that reads it."""

    class Schedule:
        scale = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * Schedule.scale

    compiled, x = torch.compile(scaled, backend="eager"), torch.ones(2)
    compiled(x)
    Schedule.scale = 10.0
    return differences("output", scaled(x), compiled(x))


@regression("guards", 169253, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def class_list() -> list[str]:
    """An append to a list of the class is lost in a compiled forward."""

    class Recorder(torch.nn.Module):
        losses: list[Tensor] = []

        def forward(self, x: Tensor) -> None:
            Recorder.losses.append(x)

    compiled = torch.compile(Recorder().forward, backend="eager")
    for _ in range(2):
        compiled(torch.ones(2))
    return [] if len(Recorder.losses) == 2 else [f"{len(Recorder.losses)} of 2 appended"]


@regression("guards", 176599, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def property_setter() -> list[str]:
    """A property's setter is skipped for an object made inside a compiled function."""

    class Clipped:
        def __init__(self, limit: int) -> None:
            self._limit = limit

        @property
        def limit(self) -> int:
            return self._limit + 1

        @limit.setter
        def limit(self, value: int) -> None:
            self._limit = value * 2

    def shifted(x: Tensor) -> Tensor:
        clipped = Clipped(3)
        clipped.limit = 5
        return x + clipped.limit

    return compiled_differs(shifted, torch.zeros(2), backend="eager")


@regression("guards", 176596, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def property_setter_in_init() -> list[str]:
    """A property's setter is skipped where the constructor of an object made inside a compiled function assigns it."""

    class Clamped:
        def __init__(self, value: int) -> None:
            self.value = value

        @property
        def value(self) -> int:
            return self._value

        @value.setter
        def value(self, value: int) -> None:
            self._value = 100 if value > 100 else value

    return compiled_differs(lambda x: x + Clamped(200).value, torch.zeros(2), backend="eager")


@regression("guards", 178365, bad="2.9.0 2.10.0 2.11.0", good="2.8.0 2.12.0 2.13.0 2.14.1 2.15.0")
def function_defaults() -> list[str]:
    """A function with the same code and other defaults runs the graph of the first one."""

    def shift_by(offset: int):
        def shift(x: Tensor, offset: int = offset) -> Tensor:
            return x + offset

        return shift

    compiled = torch.compile(lambda x, shift: shift(x), backend="eager")
    x = torch.zeros(2)
    shifts = [shift_by(1), shift_by(2)]
    return [line for shift in shifts for line in differences("output", shift(x), compiled(x, shift))]
