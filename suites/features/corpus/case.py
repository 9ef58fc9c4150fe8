"""A case of the corpus: the smallest program that shows one regression of torch, and the releases it was run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

Find = Callable[[], list[str]]
ISSUES = "https://github.com/pytorch/pytorch/issues/"
NO_THREAD = "no upstream thread found"
# Every case of the corpus, in the order of its modules.
CASES: list[Case] = []


@dataclass(frozen=True)
class Case:
    """One regression.

    area: the part of torch.
    issue: number of the upstream thread, None if none was found.
    bad, good: the releases on which it was run, by their result.
    error: words of the exception that is its signature, "" if its signature is a wrong result.
    find: runs the program and returns a line for each difference from the derived expectation. Its name is that of the
    case, and its docstring the title.
    """

    area: str
    issue: int | None
    bad: tuple[str, ...]
    good: tuple[str, ...]
    error: str
    find: Find

    @property
    def name(self) -> str:
        return f"{self.area}-{self.find.__name__}"

    @property
    def title(self) -> str:
        return (self.find.__doc__ or "").rstrip(".")

    @property
    def row(self) -> str:
        return f"features/{self.name}/defect"

    @property
    def link(self) -> str:
        return f"{ISSUES}{self.issue}" if self.issue else NO_THREAD

    @property
    def known_in(self) -> str:
        """The bad releases as a requirement: from the first bad one up to the next good one, without good ones."""
        first, last = Version(self.bad[0]), Version(self.bad[-1])
        after = [v for v in self.good if Version(v) > last]
        limit = after[0] if after else f"{last.major}.{last.minor + 1}"
        between = [v for v in self.good if first < Version(v) < last]
        return ",".join((f"torch>={first}", f"<{limit}", *(f"!={v}" for v in between)))

    def signature(self) -> list[str]:
        """Run the program, seeded: the lines of the regression's signature, none if torch is correct.

        Any other exception of the program propagates: it is neither result.
        """
        torch.manual_seed(0)
        try:
            return self.find()
        except Exception as error:
            if not self.error or self.error not in str(error):
                raise
            return [f"{type(error).__name__}: {self.error}"]


def regression(
    area: str, issue: int | None, *, bad: str, good: str, error: str = ""
) -> Callable[[Find], Find]:
    """Add the decorated program to the corpus; bad and good are releases, separated by spaces, in ascending order."""

    def add(find: Find) -> Find:
        CASES.append(Case(area, issue, tuple(bad.split()), tuple(good.split()), error, find))
        return find

    return add


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors(value)


def differences(what: str, expected: Any, found: Any, tolerance: float | None = None) -> list[str]:
    """A line for each tensor that differs from the expected one.

    tolerance: absolute and relative; that of torch.testing for the dtype if None.
    """
    pairs = list(zip(tensors(expected), tensors(found), strict=True))
    lines = []
    for n, (right, value) in enumerate(pairs):
        try:
            torch.testing.assert_close(value, right, atol=tolerance, rtol=tolerance)
        except AssertionError as error:
            lines.append(f"{what} {n}: {' '.join(str(error).split())}")
    return lines


def one_graph(function: Callable[..., Any], *operands: Any) -> list[str]:
    """Dynamo's reason if the function does not compile to one graph; the differences of its results otherwise."""
    expected = function(*_fresh(operands))
    try:
        found = torch.compile(function, backend="eager", fullgraph=True)(*_fresh(operands))
    except RuntimeError as error:
        if type(error).__name__ != "Unsupported":
            raise
        return [f"graph break: {str(error).splitlines()[0]}"]
    return differences("output", expected, found)


def _fresh(operands: Sequence[Any]) -> list[Any]:
    """Copies of the operands with their strides, as new leaves."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        .copy_(t.detach())
        .requires_grad_(t.requires_grad)
        if isinstance(t, Tensor)
        else t
        for t in operands
    ]


def compiled_differs(
    function: Callable[..., Any],
    *operands: Any,
    backend: str = "inductor",
    tolerance: float | None = None,
    **compile_options: Any,
) -> list[str]:
    """Differences of the compiled function from the eager one: outputs, operands after the call, and gradients.

    The gradients are those of the operands that require one, for a weighted sum of the differentiable outputs.
    """
    eager_operands, compiled_operands = _fresh(operands), _fresh(operands)
    torch.manual_seed(0)
    expected = function(*eager_operands)
    torch.manual_seed(0)
    found = torch.compile(function, backend=backend, **compile_options)(*compiled_operands)
    lines = differences("output", expected, found, tolerance)
    leaves = [t for t in tensors(eager_operands) if t.requires_grad]
    if leaves:
        for outputs in (expected, found):
            sum((n + 1) * t.sum() for n, t in enumerate(tensors(outputs)) if t.requires_grad).backward()
        gradients = [
            [t.grad for t in tensors(side) if t.requires_grad] for side in (eager_operands, compiled_operands)
        ]
        lines += differences("gradient", *gradients, tolerance)
    return lines + differences("operand", eager_operands, compiled_operands, tolerance)
