"""Laws of the ops with a plain formula: value, gradient, compilation and errors, written once over the table OPS."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from suites.kernels import inputs as op_inputs
from suites.kernels.formula_op import Case, FormulaOp
from suites.support.comparison import gradients
from suites.support.custom_ops import check_one_graph, refused
from suites.support.lanes import Lane, lanes

MODULES = [getattr(op_inputs, name) for name in op_inputs.__all__]
OPS = [module.OP for module in MODULES if hasattr(module, "OP")]
each = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def each_case(table: str) -> Any:
    """Parametrize a test by op and case of this table of the op."""
    found = [
        pytest.param(op, case, id=f"{op.name}-{name}")
        for op in OPS
        for name, case in getattr(op, table).items()
    ]
    return pytest.mark.parametrize(("op", "case"), found)


@lanes("cpu")
def test_every_op_is_in_one_of_the_two_tables(lane: Lane) -> None:
    """Those of two inputs modules have results of several kinds, and laws in files of their own."""
    absent = {m.__name__.rpartition(".")[2] for m in MODULES if not (hasattr(m, "OP") or hasattr(m, "SCAN"))}
    assert absent == {"dsa_loss", "moe_dispatch"}


@lanes("cpu", "h200")
@each_case("cases")
def test_fp64_equals_the_plain_formula(lane: Lane, op: FormulaOp, case: Case) -> None:
    inputs = op.make_inputs(**case.inputs, device=lane.device)
    plain = gradients(op.formula, *inputs, **case.options)
    for impl in op.forms:
        found = gradients(partial(op.run, impl=impl), *inputs, **case.options)
        for ours, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=op.rounding, atol=op.rounding)


@lanes("cpu")
@each_case("gradcheck")
def test_gradcheck(lane: Lane, op: FormulaOp, case: Case) -> None:
    inputs = op.make_inputs(**case.inputs)
    floats = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.is_floating_point()]

    def run(*leaves: Tensor) -> Tensor:
        given = {**dict(enumerate(inputs)), **dict(zip(floats, leaves))}
        return op.run(*given.values(), **case.options)

    assert torch.autograd.gradcheck(run, [inputs[i].requires_grad_() for i in floats])


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", [op for op in OPS if op.batches], ids=lambda op: op.name)
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane, op: FormulaOp) -> None:
    def train(function: Any, inputs: Any) -> list[Tensor]:
        return gradients(function, *inputs, **op.compiled)

    batches = [op.make_inputs(**sizes, dtype=torch.float32, device=lane.device) for sizes in op.batches]
    check_one_graph(op.run, train, batches, op=op.name, dynamic=op.dynamic)


@lanes("cpu")
@each
def test_bad_input_raises_one_line_error(lane: Lane, op: FormulaOp) -> None:
    inputs = op.make_inputs(**op.bad)
    for arguments, options, words in op.refusals(*inputs):
        with refused(op.name, words):
            op.run(*arguments, **options)
    with refused(op.name, "choices are"):
        op.run(*inputs, impl="fast")
