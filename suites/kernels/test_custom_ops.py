"""Every kernel of ours is a custom op, opaque to the compiler in both directions: rule C15.

The checks of suites/support/custom_ops.py, which each op's own suite runs, are tested here on the faults they exist
for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
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
from suites.ops import op_names, specs
from suites.ops.spec import Named, OpSpec
from suites.support.comparison import outputs_of, random_weights
from suites.support.custom_ops import EveryCall, check_op, strided, turned
from suites.support.instruments import OpCheckError, OpDefinition, op_definitions
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

OPS = op_names()
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
    row.count(
        "kernels/custom_ops-cpu/ops_not_opaque", [*faults, *(f"{op}: registers no op" for op in absent)],
        expected=0, rule="C15", seen=found,
    )  # fmt: skip


def scratch_op(body: Callable[[Tensor], Tensor], differentiable: bool = True) -> Callable[..., Tensor]:
    """Define a temporary custom op under a unique name, whose result is like its input."""
    name = f"bumpgate_planted::op{next(NUMBER)}"
    op = torch.library.custom_op(name, body, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    if differentiable:
        op.register_autograd(lambda ctx, g: 2 * g)
    return op


# Faults in an op of ours: attributes of kernels/rms_norm_gated/op.py, of op_support or of its forward op, and their
# replacements.
FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "a fake of another shape": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape[0], x.shape[1] + 1)},
    "a fake of another dtype": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape, dtype=torch.float64)},
    "a fake of other strides": {"_abstract_fn": lambda x, *_: x.new_empty(x.shape[::-1]).mT},
    "a result that is its input": {"rms_norm_gated_eager": lambda x, *_: x, "contiguous_clone": lambda t: t},
    "an input that is changed": {"rms_norm_gated_eager": lambda x, *_: x.mul_(2)},
}
HOLDERS = {"_abstract_fn": norm.rms_norm_gated_fwd, "contiguous_clone": op_support}


def check_norm() -> None:
    """Check the forward op of rms_norm_gated, on (3,6) in fp32."""
    inputs = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)
    check_op(torch.ops.bumpgate.rms_norm_gated_fwd.default, (*inputs, 1e-5, 3, False), differentiable=True)


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

    def custom_op(name: str, eager: Callable[..., Any], mutates_args: tuple, schema: str | None) -> Any:
        return SimpleNamespace(
            register_kernel=lambda device: lambda launch: launches.update({device: launch})
        )

    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    kernel = SimpleNamespace(doubled_kernel=lambda x: "kernel")
    monkeypatch.setattr(torch.library, "custom_op", custom_op)
    monkeypatch.setitem(sys.modules, "kernels.doubling.kernel", kernel)
    wide, name = torch.ones(2, dtype=torch.float64), "kernels.doubling.kernel:doubled_kernel"
    op_support.opaque_op(name, eager_fp64=True)(doubled)
    assert launches["cuda"](wide).tolist() == [2, 2]
    assert launches["cuda"](torch.ones(2)) == "kernel"
    op_support.opaque_op(name)(doubled)
    assert launches["cuda"](wide) == "kernel"
    launches.clear()
    op_support.opaque_op()(doubled)
    assert launches == {}


@lanes("cpu")
def test_op_without_backward_is_refused(lane: Lane) -> None:
    op = scratch_op(lambda x: 2 * x, differentiable=False)
    with pytest.raises((AssertionError, RuntimeError, OpCheckError)):
        check_op(op._opoverload, (torch.randn(3, 5),), differentiable=True)


def reads_a_pointer(x: Tensor) -> Tensor:
    return x * float(x.data_ptr() != 0)


@lanes("cpu")
@planted("C15", "allow_in_graph over a kernel that takes pointers")
def test_allow_in_graph_cannot_replace_a_custom_op(lane: Lane, canaries) -> None:
    """A fake tensor has no data pointer; the body of a custom op is never run on one."""
    canaries("graphs")

    def graphs(function: Callable[[Tensor], Tensor]) -> int:
        with DynamoWatch() as watch:
            compiled = torch.compile(
                lambda x: function(x) + 1, backend=watch.backend("eager"), fullgraph=True
            )
            compiled(torch.randn(3))
        return watch.report.unique_graphs

    with pytest.raises(RuntimeError, match=r"data_ptr|pointer|storage"):
        graphs(torch.compiler.allow_in_graph(reads_a_pointer))
    assert graphs(scratch_op(lambda x: reads_a_pointer(x).clone())) == 1


def programs() -> dict[str, tuple[OpSpec, Named, Callable[..., Any]]]:
    """Return calls of the ops, with their inputs by name in fp64: each golden one, and those of `contract`."""
    golden = {name: (op, op.golden.inputs(), op.golden.function) for name, op in specs().items()}
    return golden | {
        f"{op.name}-{name}": (op, op.named(**case.inputs), partial(op.run, **case.options))
        for op in specs().values()
        for name, case in op.contract.items()
    }


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "strided": strided,
    "turned": turned,
}


def calls_of(name: str, dtype: torch.dtype, layout: str, device: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return every call of a custom op in a training step, each compared with its fake."""
    op, inputs, function = programs()[name]

    def given(n: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        cast = t.is_floating_point()
        kept = dtype.itemsize < 4 and n in op.stays_fp32
        t = t.to(device, (torch.float32 if kept else dtype) if cast else t.dtype)
        return (LAYOUTS[layout](t) if t.dim() else t).requires_grad_(cast)

    leaves = {n: given(n, t) for n, t in inputs.items()}
    with EveryCall() as seen:
        outputs = [t for t in outputs_of(function(**leaves)) if t.requires_grad]
        weights = [LAYOUTS[layout](t) if t.dim() else t for t in random_weights(outputs)]
        floats = [t for t in leaves.values() if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.grad(outputs, floats, weights, allow_unused=True)
    return seen.calls


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", programs())
def test_fake_matches_the_real_result_in_every_layout(lane: Lane, name: str, dtype: str) -> None:
    for layout in LAYOUTS:
        assert len(calls_of(name, getattr(torch, dtype), layout, lane.device)) >= 2


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", programs())
def test_op_contract(lane: Lane, name: str) -> None:
    """torch.library.opcheck of every call, on inputs and gradients of which none is contiguous."""
    defined = op_definitions("bumpgate")
    for op, arguments in calls_of(name, torch.float32, "strided", lane.device):
        check_op(op, arguments, defined[op.name().split("::")[1]].backward)


@lanes("cpu")
def test_programs_run_every_custom_op(lane: Lane) -> None:
    ran = {op.name() for name in specs() for op, _ in calls_of(name, torch.float32, "contiguous", "cpu")}
    # Other packages, such as launch, define custom ops of their own.
    assert ran == {f"bumpgate::{name}" for name in op_definitions("bumpgate", "kernels.")}


@lanes("cpu")
@pytest.mark.parametrize("name", specs())
def test_reference_runs_none_of_our_ops(lane: Lane, name: str) -> None:
    golden = specs()[name].golden
    inputs = golden.inputs()
    with EveryCall() as seen:
        golden.function(**inputs, impl="eager")
    assert not seen.calls
