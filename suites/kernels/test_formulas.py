"""Laws of every op: value, gradient, compilation, documents and error messages. test_scans.py has the scans' laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from suites.ops import specs
from suites.ops.spec import Case, Documents, OpSpec
from suites.support.comparison import error, gradients, trained
from suites.support.custom_ops import EveryCall, check_one_graph, refused
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick
from suites.support.scans import cut

OPS = [*specs().values()]


def each_op(ops: Iterable[OpSpec]) -> Any:
    return pytest.mark.parametrize("op", ops, ids=lambda op: op.registered)


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


@lanes("cpu", "h200")
@quick
@given(data=st.data(), seed=st.integers(0, 99))
@each_op([op for op in OPS if op.sizes])
def test_drawn_sizes_equal_the_plain_formula(lane: Lane, op: OpSpec, data: st.DataObject, seed: int) -> None:
    sizes = {name: data.draw(values) for name, values in op.sizes.items()}
    inputs = op.inputs(**sizes, seed=seed, device=lane.device)
    plain = gradients(op.naive, *inputs)
    for ours, theirs in zip(gradients(op.run, *inputs), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=op.rounding, atol=op.rounding)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99))
@each_op([op for op in OPS if any(case.options.get("softcap") for case in op.cases.values())])
def test_large_softcap_equals_no_softcap(lane: Lane, op: OpSpec, seed: int) -> None:
    """tanh(x) = x - x^3/3: at c = 1e6 the cubic term of a logit below 20 is under 3e-9."""
    inputs = op.inputs(seed=seed, device=lane.device)
    plain = op.run(*inputs)
    torch.testing.assert_close(op.run(*inputs, softcap=1e6), plain, rtol=0, atol=1e-8)
    assert error(op.run(*inputs, softcap=1.0), plain)[0] > 1e-2


@lanes("cpu")
@each_case("gradcheck")
def test_gradcheck(lane: Lane, op: OpSpec, case: Case) -> None:
    """Of the function, and of the custom op inside with all its outputs, such as a logsumexp that has no gradient."""
    inputs = op.inputs(**case.inputs)
    with EveryCall() as seen:
        op.run(*inputs, **case.options)
    ((custom_op, arguments),) = seen.calls
    check_gradients(partial(op.run, **case.options), inputs)
    check_gradients(custom_op, arguments)


def check_gradients(function: Callable[..., Any], inputs: Any) -> None:
    leaves = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
    floats = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]

    def run(*given: Tensor) -> Any:
        return function(*{**dict(enumerate(leaves)), **dict(zip(floats, given))}.values())

    assert torch.autograd.gradcheck(run, [leaves[i].requires_grad_() for i in floats])


@lanes("cpu", "h200")
@each_op([op for op in OPS if op.batches])
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane, op: OpSpec) -> None:
    def train(function: Any, inputs: Any) -> list[Tensor]:
        outputs, grads = trained(partial(function, **op.compiled), inputs)
        return [*outputs, *grads.values()]

    batches = [op.named(**sizes, dtype=torch.float32, device=lane.device) for sizes in op.batches]
    check_one_graph(op.run, train, batches, op=op.registered, dynamic=op.dynamic.split())


each_document = pytest.mark.parametrize(
    ("op", "documents", "options"),
    [
        pytest.param(op, op.documents, options, id=f"{op.registered}-{name}")
        for op in OPS
        if op.documents
        for name, options in op.documents.cases.items()
    ],
)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), first=st.integers(1, 12), second=st.integers(1, 12))
@each_document
def test_packed_document_equals_document_alone(
    lane: Lane, op: OpSpec, documents: Documents, options: dict[str, Any], seed: int, first: int, second: int
) -> None:
    """Attention equals to rounding only: a row's sum runs over other keys (at weight 0) and in other blocks."""
    inputs = documents.inputs(T=first + second, seed=seed, device=lane.device)
    inputs["doc_ids"] = torch.tensor([[0] * first + [1] * second] * 2).to(inputs["doc_ids"])
    packed = op.run(**inputs, **options)[:, first:]
    alone = op.run(**cut(inputs, slice(first, None), documents.per_token), **options)
    torch.testing.assert_close(packed, alone, rtol=documents.rounding, atol=documents.rounding)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), at=st.integers(0, 15))
@each_document
def test_token_changes_the_results_of_those_that_see_it(
    lane: Lane, op: OpSpec, documents: Documents, options: dict[str, Any], seed: int, at: int
) -> None:
    """No bit of the results of the past, of another document or beyond the window changes."""
    inputs = documents.inputs(T=16, dtype=torch.float32, seed=seed, device=lane.device)
    inputs["doc_ids"] = (torch.arange(16) // 6 % 2).expand(2, 16).to(inputs["doc_ids"])
    before = op.run(**inputs, **options)
    for i, name in enumerate(documents.keys):
        inputs[name][:, at] += (-1) ** i
    changed = (op.run(**inputs, **options) != before).flatten(2).any(2)
    assert torch.equal(changed, documents.sees(inputs | options)[:, :, at])


@lanes("cpu")
@each_op(OPS)
def test_bad_input_raises_one_line_error(lane: Lane, op: OpSpec) -> None:
    inputs = op.named(**op.bad)
    for changes, words in [*op.refusals(**inputs), ({"impl": "fast"}, "choices are")]:
        with refused(op.registered, words):
            op.run(**inputs | changes)
