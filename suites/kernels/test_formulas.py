"""Laws of every op: value, gradient, compilation and errors. test_scans.py has the laws of the scans."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from suites.ops import specs
from suites.ops.spec import Case, OpSpec
from suites.support.comparison import gradients
from suites.support.custom_ops import check_one_graph, refused
from suites.support.lanes import Lane, lanes

OPS = [*specs().values()]


def each_case(table: str) -> Any:
    """Parametrize a test by op and case of this table of the op."""
    found = [
        pytest.param(op, case, id=f"{op.registered}-{name}")
        for op in OPS
        for name, case in getattr(op, table).items()
    ]
    return pytest.mark.parametrize(("op", "case"), found)


@lanes("cpu", "h200")
@each_case("cases")
def test_fp64_equals_the_plain_formula(lane: Lane, op: OpSpec, case: Case) -> None:
    inputs = op.inputs(**case.inputs, device=lane.device)
    plain = gradients(op.naive, *inputs, **case.options)
    for impl in op.forms:
        found = gradients(partial(op.run, impl=impl), *inputs, **case.options)
        for ours, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=op.rounding, atol=op.rounding)


@lanes("cpu")
@each_case("gradcheck")
def test_gradcheck(lane: Lane, op: OpSpec, case: Case) -> None:
    inputs = op.inputs(**case.inputs)
    floats = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.is_floating_point()]

    def run(*leaves: Tensor) -> Any:
        given = {**dict(enumerate(inputs)), **dict(zip(floats, leaves))}
        return op.run(*given.values(), **case.options)

    assert torch.autograd.gradcheck(run, [inputs[i].requires_grad_() for i in floats])


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", [op for op in OPS if op.batches], ids=lambda op: op.registered)
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane, op: OpSpec) -> None:
    def train(function: Any, inputs: Any) -> list[Tensor]:
        return gradients(function, *inputs, **op.compiled)

    batches = [op.inputs(**sizes, dtype=torch.float32, device=lane.device) for sizes in op.batches]
    check_one_graph(op.run, train, batches, op=op.registered, dynamic=op.dynamic)


@lanes("cpu")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.registered)
def test_bad_input_raises_one_line_error(lane: Lane, op: OpSpec) -> None:
    inputs = op.named(**op.bad)
    for changes, words in [*op.refusals(**inputs), ({"impl": "fast"}, "choices are")]:
        with refused(op.registered, words):
            op.run(**inputs | changes)
