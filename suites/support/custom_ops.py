"""Checks of custom ops: torch's requirements and ours on layouts, one graph for all batch sizes, and error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoReport, DynamoWatch, require_dynamic_batch, reset_dynamo
from suites.support import canaries
from suites.support.instruments import EveryOperator, op_calls


def strided(t: Tensor) -> Tensor:
    """Return the same tensor with a gap between its elements: an op may rely on no layout."""
    return t.repeat_interleave(2, -1)[..., ::2]


def turned(t: Tensor) -> Tensor:
    """Return the same tensor with its axes in the reverse order in memory, as in the gradient of a transposed view."""
    axes = [*reversed(range(t.ndim))]
    return t.permute(axes).contiguous().permute(axes)


class EveryCall(EveryOperator):
    """Records the calls of our ops. Compares each with its fake: shapes, dtypes and strides of contiguous results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "bumpgate":
            fake = func(*(t.to("meta") if isinstance(t, Tensor) else t for t in args))
            for i, both in enumerate(zip(_tensors(found), _tensors(fake), strict=True)):
                real, made = ((t.shape, t.stride(), t.dtype) for t in both)
                assert real == made, f"{func}: output {i} is {real}, its fake's is {made}"
                assert both[0].is_contiguous(), f"{func}: output {i} has strides {both[0].stride()}"
            self.calls.append((func, args))
        return found


def check_op(op: Callable[..., Any], arguments: Sequence[Any], differentiable: bool) -> None:
    """Run torch.library.opcheck; a differentiable op also with gradients of the floating-point arguments."""
    plain = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
    with EveryCall():
        op(*plain)
    torch.library.opcheck(op, tuple(plain))
    if differentiable:
        torch.library.opcheck(op, tuple(_with_gradient(t) for t in plain))


def _with_gradient(t: Any) -> Any:
    return t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def check_compiled(
    function: Callable[..., Any],
    train: Callable[[Callable[..., Any], Any], Any],
    batches: Iterable[Any],
    *,
    op: str,
    calls: int,
    dynamic: Sequence[int | str],
    tolerance: float = 0.0,
) -> DynamoReport:
    """Check that `function` compiled with fullgraph equals eager, forward and backward, for every batch.

    train(f, inputs): results and gradients of f. dynamic: positions or names of the arguments whose first axis is the
    batch; a graph specialized to one size of it raises. calls: how often one step runs bumpgate::<op>_fwd and _bwd.
    tolerance: relative and absolute; 0 is bitwise. Returns the Dynamo report; the caller asserts one graph.
    """

    def compiled_step(*inputs: Any, **named: Any) -> Any:
        given = {**dict(enumerate(inputs)), **named}
        for key in dynamic:
            require_dynamic_batch(given[key])
        return compiled(*inputs, **named)

    _check_op_calls()
    with DynamoWatch() as watch:
        compiled = torch.compile(function, fullgraph=True, backend=watch.backend("aot_eager"))
        for inputs in batches:
            eager = _tensors(train(function, inputs))
            train(compiled_step, inputs)
            # Tracing also ran the op's fake, so calls are counted in a later step.
            with op_calls("bumpgate") as ran:
                found = _tensors(train(compiled_step, inputs))
            assert [ran[f"{op}_{way}"] for way in ("fwd", "bwd")] == [calls, calls]
            for ours, theirs in zip(found, eager, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return watch.report


@cache
def _check_op_calls() -> None:
    """Check the instrument op_calls, once per process. Raises CanaryError."""
    canaries.op_calls()
    reset_dynamo()


def check_one_graph(
    function: Callable[..., Any],
    train: Callable[[Callable[..., Any], Any], Any],
    batches: Iterable[Any],
    *,
    op: str,
    dynamic: Sequence[int | str],
) -> None:
    """Run check_compiled bitwise: one graph for all batches, which calls the op once without its input checks."""
    report = check_compiled(function, train, batches, op=op, calls=1, dynamic=dynamic)
    (graph,) = report.graphs
    assert [name for name in graph.operators if "getitem" not in name] == [f"bumpgate.{op}_fwd.default"]


def traced_through(function: Callable[..., Any], train: Callable[..., Any], inputs: Any) -> Any:
    """Compile `function` to one graph of more than 20 torch operators and none of ours; return its result."""
    with DynamoWatch() as watch:
        compiled = torch.compile(function, fullgraph=True, backend=watch.backend("aot_eager"))
        found = train(compiled, inputs)
    (graph,) = watch.report.graphs
    assert graph.ops > 20
    assert not any("bumpgate" in operator for operator in graph.operators)
    return found


@contextmanager
def refused(op: str, words: str) -> Iterator[None]:
    """Assert that the block raises a one-line ValueError that begins with the op's name and contains `words`."""
    with pytest.raises(ValueError, match=f"^{op}: .*{words}") as caught:
        yield
    assert "\n" not in str(caught.value)
