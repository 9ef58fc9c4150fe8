"""The ops at the model's shapes on meta tensors, and the kernels that each compiles for an H200.

A case is called as in the model, forward and backward. Next to each of its custom ops runs the launch function that
replaces it on CUDA, with the same arguments; the fake's results are passed on. So a new op is compiled without
a change here, as long as the op `x_fwd` of kernels/x/op.py is launched by `x_fwd_kernel` of kernels/x/kernel.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from suites.kernels.peer_tuning import op_of
from suites.ops import timed_cases
from suites.ops.spec import BF16
from suites.support.recording_driver import Compiled, recording

B = 4  # as timed on the H200 lane


class OnMeta(TorchFunctionMode):
    """Create tensors requested on CUDA on meta instead: shapes, strides and dtypes without memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        if func == Tensor.bincount:  # not on meta: without a minlength, its length depends on the data
            return args[0].new_empty(kwargs["minlength"], dtype=torch.int64)
        return func(*args, **kwargs)


def compile_case(name: str, dtype: torch.dtype) -> tuple[list[Compiled], set[str]]:
    """Return the kernels of the case's op, forward and backward, with `dtype` for bf16, and the launch functions
    called.

    Raises AssertionError if a launch function's results differ from the fake's in shape, dtype or strides.
    """
    with OnMeta():
        case = timed_cases()[name].make(B)
    inputs = [t.to(dtype) if t.dtype == BF16 else t for t in case.inputs]
    leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    ran: set[str] = set()
    op, kernel = (import_module(f"kernels.{op_of(name)}.{file}") for file in ("op", "kernel"))
    both = {
        n: _with_launch(f, getattr(kernel, f"{n}_kernel"), ran)
        for n, f in vars(op).items()
        if isinstance(f, torch.library.CustomOpDef)
    }
    with recording() as launched, patch.multiple(op, **both):
        result = case.op(*inputs)
        outputs = [t for t in ((result,) if isinstance(result, Tensor) else result) if t.requires_grad]
        torch.autograd.grad(outputs, leaves, [torch.empty_like(t) for t in outputs], allow_unused=True)
    return launched, ran


def launch_functions(op: str) -> set[str]:
    """Return the public plain functions of the op's kernel.py that end in `_kernel`."""
    functions = vars(import_module(f"kernels.{op}.kernel"))
    return {
        name
        for name, f in functions.items()
        if isinstance(f, FunctionType) and name.endswith("_kernel") and not name.startswith("_")
    }


def _with_launch(op: Callable[..., Any], launch: Callable[..., Any], ran: set[str]) -> Callable[..., Any]:
    """Wrap the custom op so that its launch function runs next to it."""

    def both(*args: Any) -> Any:
        results = op(*args)
        with torch.no_grad():
            found = launch(*args)
        ran.add(launch.__name__)
        assert list(map(_layout, _tensors(found))) == list(map(_layout, _tensors(results))), launch.__name__
        return results

    return both


def _tensors(results: Any) -> Iterable[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.stride()


def by_label(launched: list[Compiled]) -> dict[str, Compiled]:
    """Return kernels by name; one compiled more than once, with the constants that distinguish its variants."""
    forms: defaultdict[str, list[Compiled]] = defaultdict(list)
    for compiled in launched:
        forms[compiled.kernel.lstrip("_")].append(compiled)
    return {label: c for kernel, several in forms.items() for label, c in _labelled(kernel, several)}


def _labelled(kernel: str, several: list[Compiled]) -> list[tuple[str, Compiled]]:
    names = list(dict.fromkeys(n for c in several for n in c.constants))
    telling = [n for n in names if len({str(c.constants.get(n)) for c in several}) > 1]
    labels = [".".join([kernel, *(f"{n}={c.constants.get(n)}" for n in telling)]) for c in several]
    if len(set(labels)) < len(several):
        labels = [f"{label}.{i}" for i, label in enumerate(labels, 1)]
    return list(zip(labels, several))
