"""Every kernel of ours is a custom op, opaque to the compiler in both directions: rule C15.

The checks of suites/support/custom_ops.py, which each op's own suite runs, are tested here on the faults they exist
for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch
from kernels import op_support
from kernels.rms_norm_gated import op as norm
from suites.kernels.mutants import subjects
from suites.ops import op_names
from suites.support.comparison import gradients
from suites.support.custom_ops import check_op, turned
from suites.support.instruments import EveryOperator, OpCheckError, OpDefinition, op_definitions
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

OPS, SUBJECTS = op_names(), subjects()
NUMBER = count()


def lacks(name: str, op: OpDefinition, ops: Mapping[str, OpDefinition]) -> list[str]:
    """Return what a custom op of ours must define and does not."""
    missing = [] if op.fake else [f"{name}: no fake"]
    if name.replace("_fwd", "_bwd") in ops.keys() - {name} and not op.backward:
        missing.append(f"{name}: no registered backward")
    return missing


@lanes("cpu")
def test_every_op_is_opaque_in_forward_and_backward(lane: Lane, row, canaries) -> None:
    canaries("op_definitions")
    for op in OPS:
        import_module(f"kernels.{op}.op")
    found = op_definitions("bumpgate")
    faults = [line for name, op in sorted(found.items()) for line in lacks(name, op, found)]
    absent = [op for op in OPS if not any(name.startswith(op) for name in found)]
    row(
        "kernels/custom_ops-cpu/ops_not_opaque", len(faults) + len(absent), unit="count", witness=len(found),
        rule="C15", expected=0, evidence=[*faults, *(f"{op}: registers no op" for op in absent)],
        instruments=("op_definitions",),
    )  # fmt: skip


def scratch_op(
    real: Callable[[Tensor], Tensor], fake: Callable[[Tensor], Tensor], backward: Callable[..., Tensor] | None
) -> Callable[..., Tensor]:
    """Define a temporary custom op under a unique name."""
    name = f"bumpgate_planted::op{next(NUMBER)}"
    op = torch.library.custom_op(name, real, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(fake)
    if backward:
        op.register_autograd(backward)
    return op


def doubled(x: Tensor) -> Tensor:
    return (2 * x).contiguous()


def same(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def gradient(ctx: object, g: Tensor) -> Tensor:
    return 2 * g


# Faults in an op of ours: attributes of kernels/rms_norm_gated/op.py, of op_support or of its forward op, and their
# replacements.
FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "a fake of another shape": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape[0], x.shape[1] + 1)},
    "a fake of another dtype": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape, dtype=torch.float64)},
    "a fake of other strides": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape[::-1]).mT},
    "a result that is its input": {
        "rms_norm_gated_eager": lambda x, *_: x,
        "contiguous_clone": lambda t: t,
    },
    "an input that is changed": {"rms_norm_gated_eager": lambda x, *_: x.mul_(2)},
}
HOLDERS = {"_abstract_fn": norm.rms_norm_gated_fwd, "contiguous_clone": op_support}


def check_norm() -> None:
    """Check the forward op of rms_norm_gated, on (3,6) in fp32."""
    inputs = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)
    check_op(norm.rms_norm_gated_fwd, (*inputs, 1e-5, 3, False), differentiable=True)


@lanes("cpu")
def test_correct_op_passes_the_checks(lane: Lane) -> None:
    check_norm()


@lanes("cpu")
@pytest.mark.parametrize("name", [pytest.param(name, marks=planted("C15", name)) for name in FAULTS])
def test_incorrect_op_fails_the_checks(lane: Lane, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, fault in FAULTS[name].items():
        holder = HOLDERS.get(attribute, norm)
        assert callable(getattr(holder, attribute)), "what the fault replaces is not there"
        monkeypatch.setattr(holder, attribute, fault)
    with pytest.raises((AssertionError, RuntimeError, OpCheckError)):
        check_norm()


@lanes("cpu")
def test_fp64_runs_eager_on_cuda_and_other_dtypes_the_kernel(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: dict[str, Callable[..., Any]] = {}

    def custom_op(name: str, eager: Callable[..., Any], mutates_args: tuple) -> Any:
        return SimpleNamespace(
            register_kernel=lambda device: lambda launch: launches.update({device: launch})
        )

    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(torch.library, "custom_op", custom_op)
    monkeypatch.setitem(
        sys.modules, "kernels.doubling.kernel", SimpleNamespace(doubled_kernel=lambda x: "kernel")
    )
    opaque, kernel = op_support.opaque_op, "kernels.doubling.kernel:doubled_kernel"
    opaque(kernel, eager_fp64=True)(doubled)
    assert launches["cuda"](torch.ones(2, dtype=torch.float64)).tolist() == [2, 2]
    assert launches["cuda"](torch.ones(2)) == "kernel"
    opaque(kernel)(doubled)
    assert launches["cuda"](torch.ones(2, dtype=torch.float64)) == "kernel"
    launches.clear()
    opaque()(doubled)
    assert launches == {}


@lanes("cpu")
def test_op_without_backward_is_refused(lane: Lane) -> None:
    with pytest.raises((AssertionError, RuntimeError, OpCheckError)):
        check_op(scratch_op(doubled, same, None), (torch.randn(3, 5),), differentiable=True)


def reads_a_pointer(x: Tensor) -> Tensor:
    return x * float(x.data_ptr() != 0)


@lanes("cpu")
@planted("C15", "allow_in_graph over a kernel that takes pointers")
def test_allow_in_graph_cannot_replace_a_custom_op(lane: Lane, canaries) -> None:
    """A fake tensor has no data pointer; the body of a custom op is never run on one."""
    canaries("graphs")
    allowed = torch.compiler.allow_in_graph(reads_a_pointer)
    with DynamoWatch() as watch, pytest.raises(RuntimeError, match=r"data_ptr|pointer|storage"):
        torch.compile(lambda x: allowed(x) + 1, backend=watch.backend("eager"), fullgraph=True)(
            torch.randn(3)
        )
    op = scratch_op(lambda x: reads_a_pointer(x).clone(), same, gradient)
    with DynamoWatch() as watch:
        compiled = torch.compile(lambda x: op(x) + 1, backend=watch.backend("eager"), fullgraph=True)
        compiled(torch.randn(3))
    assert watch.report.unique_graphs == 1


# The op rejects another dtype.
STAYS_FP32 = {("moe_combine", "weights")}


class FakeAgrees(EveryOperator):
    """Compares each call of our ops with its fake: shapes, dtypes and strides of the outputs. Counts the calls."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "bumpgate":
            fake = func(*(t.to("meta") if isinstance(t, Tensor) else t for t in args), **(kwargs or {}))
            real, fake = ([t] if isinstance(t, Tensor) else t for t in (found, fake))
            for i, (ours, theirs) in enumerate(zip(real, fake, strict=True)):
                kinds = [(t.shape, t.stride(), t.dtype) for t in (ours, theirs)]
                assert kinds[0] == kinds[1], f"{func}: output {i} is {kinds[0]}, its fake's is {kinds[1]}"
            self.calls += 1
        return found


@lanes("cpu")
@pytest.mark.parametrize("layout", ["contiguous", "turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_fake_matches_the_real_result(lane: Lane, name: str, dtype: torch.dtype, layout: str) -> None:
    """In a training step in both dtypes; turned: with the last two axes of each input swapped in memory."""
    subject = SUBJECTS[name]

    def cast(n: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.to(dtype) if t.is_floating_point() and (name, n) not in STAYS_FP32 else t
        return turned(t, -1, -2) if layout == "turned" and t.dim() > 1 else t

    inputs = {n: cast(n, t) for n, t in subject.inputs(0).items()}
    with FakeAgrees() as agrees:
        gradients(lambda *values: subject.op(**dict(zip(inputs, values))), *inputs.values())
    assert agrees.calls >= 2


@lanes("cpu")
@pytest.mark.parametrize("name", SUBJECTS)
def test_reference_runs_none_of_our_ops(lane: Lane, name: str) -> None:
    subject = SUBJECTS[name]
    inputs = subject.inputs(0)
    calls = {}
    for impl in ("op", "eager"):
        with FakeAgrees() as counted:
            subject.op(**inputs, impl=impl)
        calls[impl] = counted.calls
    assert calls["op"] >= 1
    assert calls["eager"] == 0
