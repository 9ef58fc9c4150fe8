"""Laws of the interpreted kernels, written once over the specs. The oracle is the reference in fp64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from suites.ops import ROOT, interpreted
from suites.ops.spec import KernelCase, KernelOp
from suites.support.custom_ops import strided, turned
from suites.support.lanes import Lane, lanes

OPS = [*interpreted().values()]


def each(table: str) -> Any:
    """Parametrize a test by op, dtype and case of this table of the op."""
    found = [
        pytest.param(op, dtype, case, id=f"{op.name}-{dtype}-{case}")
        for op in OPS
        for case in getattr(op, table)
        for dtype in case.dtypes or op.dtypes
    ]
    return pytest.mark.parametrize(("op", "dtype", "case"), found)


@lanes("cpu")
def test_every_op_with_a_kernel_is_interpreted(lane: Lane) -> None:
    assert {path.parent.name for path in ROOT.glob("kernels/*/kernel.py")} <= interpreted().keys()


@lanes("cpu")
@each("cases")
def test_kernels_meet_error_ratio_rule(lane: Lane, op: KernelOp, dtype: str, case: KernelCase) -> None:
    runs = op.arguments(dtype, case)
    found = [op.launched(**arguments) for arguments in runs]
    broken = op.rule(runs)(found)
    assert not broken
    for arguments, outputs in zip(runs, found):
        assert all((part == 0).all() for part in op.zeros(arguments, *outputs))
        assert not aliased(arguments.values(), outputs), "torch.library refuses such outputs of a custom op"


def aliased(inputs: Iterable[Any], outputs: Iterable[Tensor]) -> list[int]:
    """Return the indices of the outputs that share their storage with an input or an output before."""
    used = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    found = []
    for i, t in enumerate(outputs):
        if t.numel() and t.untyped_storage().data_ptr() in used:
            found.append(i)
        used.add(t.untyped_storage().data_ptr())
    return found


@lanes("cpu")
@each("faulty")
def test_error_ratio_rule_rejects_faults(lane: Lane, op: KernelOp, dtype: str, case: KernelCase) -> None:
    runs = op.arguments(dtype, case)
    rule = op.rule(runs)
    for name, fault in op.faults.items():
        found = [op.launched(**fault.planted(arguments)) for arguments in runs]
        others = set(range(len(found[0]))) - {*fault.spares, *fault.unseen}
        broken = rule(found, fault.unseen)
        assert broken.keys() == others, name


def sliced(t: Tensor) -> Tensor:
    """Return the same tensor as the middle of a wider one, as in a split of one projection."""
    return torch.cat((t, t, t), -1).split(t.shape[-1], -1)[1]


@lanes("cpu")
@each("layouts")
def test_input_layouts_do_not_matter(lane: Lane, op: KernelOp, dtype: str, case: KernelCase) -> None:
    for arguments in op.arguments(dtype, case):
        expected = op.launched(**arguments)
        for layout in (strided, turned, sliced):
            moved = {n: layout(t) if isinstance(t, Tensor) else t for n, t in arguments.items()}
            for ours, right in zip(op.launched(**moved), expected, strict=True):
                assert ours.stride() == right.stride()
                torch.testing.assert_close(ours, right, rtol=op.layout_rounding, atol=op.layout_rounding)


@lanes("cpu")
@each("refused")
def test_unsupported_dims_raise_one_line_error(
    lane: Lane, op: KernelOp, dtype: str, case: KernelCase
) -> None:
    with pytest.raises(ValueError, match=case.error):
        op.launched(**op.arguments(dtype, case)[0])


@lanes("cpu")
@each("expanded")
def test_expanded_gradient_equals_a_contiguous_one(
    lane: Lane, op: KernelOp, dtype: str, case: KernelCase
) -> None:
    """The gradient of a sum is one number with strides of 0."""
    arguments = op.arguments(dtype, case)[0]
    dy = arguments[op.gradients.split()[0]]
    ones = dy.new_ones(()).expand(dy.shape)
    both = (op.launched(**arguments | {op.gradients.split()[0]: t}) for t in (ones, ones.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@lanes("cpu")
@each("one_key")
def test_one_key_returns_its_value(lane: Lane, op: KernelOp, dtype: str, case: KernelCase) -> None:
    arguments = op.arguments(dtype, case)[0]
    out, _, dq, dk, dv = op.launched(**arguments)
    assert torch.equal(out, arguments["v"].repeat_interleave(2, 2))
    assert torch.equal(dv, arguments["dout"].sum(2, keepdim=True, dtype=torch.float32).to(dv.dtype))
    assert dq.abs().max() <= 1e-6 >= dk.abs().max()  # exactly 0, apart from dout.v - delta


@lanes("cpu")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@each("poisoned")
def test_nan_in_another_document_has_no_effect(
    lane: Lane, op: KernelOp, dtype: str, case: KernelCase, poison: float
) -> None:
    """A weight of 0 times nan is nan: finite results prove that the document was skipped."""
    arguments = op.arguments(dtype, case)[0]
    B, T = arguments["doc_ids"].shape
    arguments["doc_ids"] = (torch.arange(T) * 3 // T).int().repeat(B, 1)
    poisoned = arguments["doc_ids"][0] == 1
    clean = op.launched(**arguments)
    for name in (*op.per_token, op.gradients.split()[0]):
        arguments[name][:, poisoned] = poison
    pairs = [(a, b) for a, b in zip(op.launched(**arguments), clean) if a.shape[:2] == (B, T)]
    assert len(pairs) == 1 + len(op.per_token)
    for ours, expected in pairs:
        assert torch.equal(ours[:, ~poisoned], expected[:, ~poisoned])
        assert not ours[:, poisoned].isfinite().any()


@lanes("cpu")
@each("two_documents")
def test_no_bit_depends_on_another_document(lane: Lane, op: KernelOp, dtype: str, case: KernelCase) -> None:
    """The changed inputs are finite: their weight is zero but not absent, so NaN would spread, in the reference too."""
    arguments, begin = op.arguments(dtype, case)[0], case.inputs["starts"][0]
    changes = {n: _tripled(arguments[n], begin) for n in (*op.per_token, op.gradients.split()[0])}
    changes |= {n: arguments[n] + 1 for n in op.state}
    ours, changed = (op.launched(**given) for given in (arguments, arguments | changes))
    states = 1 + len(op.state)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:states], changed[1:states]))
    floats = [n for n, t in arguments.items() if isinstance(t, Tensor) and t.is_floating_point()]
    for i in (0, *(states + floats.index(n) for n in op.per_token)):
        assert torch.equal(ours[i][:, begin:], changed[i][:, begin:]), i
        assert not torch.equal(ours[i][:, :begin], changed[i][:, :begin]), i


def _tripled(t: Tensor, end: int) -> Tensor:
    """Return t with its tokens before `end` times 3."""
    return torch.cat((3 * t[:, :end], t[:, end:]), 1)
