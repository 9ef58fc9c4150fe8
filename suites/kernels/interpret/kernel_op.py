"""What the laws of the interpreted kernels (test_error_ratio.py) need to know of one op.

Arguments go by name: tensors first, in the order of the op, then options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.operands import OperandsIn

Named = dict[str, Any]
Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """sizes and inputs: arguments of make_inputs. options: further arguments of the kernels and the reference.

    dtypes: those of the op if empty. gpu_blocks: with the blocks of a GPU. error: words of the error that is raised.
    """

    sizes: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    gpu_blocks: bool = False
    error: str = ""

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in {**self.options, **self.inputs}.items()]
        return " ".join([str(self.sizes), *options, *(["GPU blocks"] if self.gpu_blocks else [])])


@dataclass(frozen=True)
class Fault:
    """Wrong arguments of a launch.

    change: name -> the wrong value, or a function of the right one. spares: indices of the outputs that stay right.
    unseen: indices of those that are not compared.
    """

    change: Mapping[str, Any]
    spares: Sequence[int] = ()
    unseen: Sequence[int] = ()

    def planted(self, arguments: Named) -> Named:
        """Return the arguments with the fault."""
        return arguments | {n: v(arguments[n]) if callable(v) else v for n, v in self.change.items()}


def passes(
    forward: Callable[..., Any], backward: Callable[..., Any] | None = None, *results: str
) -> Callable[..., Outputs]:
    """Return a function of named arguments that returns the outputs of a pass, and the gradients of its backward pass.

    Each pass gets the arguments that its parameters name. results: names of the outputs that `backward` takes.
    """

    def run(**arguments: Any) -> Outputs:
        found = _call(forward, arguments)
        found = [found] if isinstance(found, Tensor) else found
        arguments |= dict(zip(results, found))
        return *found, *(_call(backward, arguments) if backward else ())

    return run


def _call(function: Callable[..., Any], arguments: Named) -> Any:
    return function(**{n: arguments[n] for n in signature(function).parameters if n in arguments})


@dataclass(frozen=True, kw_only=True)
class KernelOp:
    """One op: how its kernels are launched, and what is particular to it.

    launched, reference: named arguments -> the outputs and the gradients. make_inputs: sizes and `dtype` -> tensors.
    blocks: (module, name) -> a value with which small inputs need several blocks, the last ones not full.
    """

    name: str
    launched: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    make_inputs: Callable[..., Named]
    blocks: Mapping[tuple[ModuleType, str], Any] = field(default_factory=dict)
    # Never bf16 (ratio.py).
    dtypes: Sequence[str] = ("fp32", "fp16")
    cases: Sequence[Case]
    # In each case of `faulty` each fault must be rejected.
    faulty: Sequence[Case]
    faults: Mapping[str, Fault]
    # Cases of the other laws.
    layouts: Sequence[Case] = ()
    refused: Sequence[Case] = ()
    expanded: Sequence[Case] = ()
    one_key: Sequence[Case] = ()
    poisoned: Sequence[Case] = ()
    two_documents: Sequence[Case] = ()
    # The largest difference of the results of other layouts.
    layout_rounding: float = 0.0
    # The gradient of the first output, and the inputs with an axis of tokens, or with the state before the first one.
    gradient: str = "dy"
    per_token: Sequence[str] = ()
    state: Sequence[str] = ()
    # A 16-bit kernel is compared with the reference with 16-bit operands of its products.
    narrow_products: bool = False
    # The second output is a logsumexp under the option "softcap".
    lse: bool = False
    # Arguments of make_inputs over which the errors of a case are pooled.
    pooled: Sequence[Mapping[str, Any]] = ({},)
    # Results of the oracle -> the minimum size of an output's terms (ratio.outside).
    terms: Callable[[Outputs], float] = lambda oracle: 0.0
    # Arguments and outputs -> parts of the outputs that are exactly 0.
    zeros: Callable[..., Sequence[Tensor]] = lambda arguments, *outputs: ()

    def arguments(self, dtype: str, case: Case) -> list[Named]:
        """Return the arguments of a case, one set for each entry of `pooled`."""
        given = dict(case.inputs) | {"dtype": DTYPES[dtype]}
        return [self.make_inputs(*case.sizes, **given, **more) | case.options for more in self.pooled]

    def rule(self, runs: Sequence[Named]) -> Callable[..., dict[int, list[str]]]:
        """Return the ratio rule for these arguments: the outputs of a launch with each -> what breaks it, by index."""
        first = next(iter(runs[0].values()))
        with OperandsIn(first.dtype) if self.narrow_products else nullcontext():
            plain = _stacked([self.reference(**arguments) for arguments in runs])
        oracle = _stacked([self.reference(**doubled(arguments)) for arguments in runs])
        softcap = runs[0].get("softcap", 0.0) if self.lse else None

        def broken(found: Sequence[Outputs], unseen: Sequence[int] = ()) -> dict[int, list[str]]:
            pairs = zip(_stacked(found), plain, strict=True)
            seen = [theirs if i in unseen else ours for i, (ours, theirs) in enumerate(pairs)]
            return outside(seen, plain, oracle, self.terms(oracle), softcap)

        return broken


def _stacked(runs: Sequence[Outputs]) -> Outputs:
    return runs[0] if len(runs) == 1 else [torch.stack(outputs) for outputs in zip(*runs, strict=True)]


def strided(arguments: Named) -> Named:
    """Return the same arguments with a gap between the elements of each tensor."""
    return {
        n: t.repeat_interleave(2, -1)[..., ::2] if isinstance(t, Tensor) else t for n, t in arguments.items()
    }


def turned(arguments: Named) -> Named:
    """Return the same arguments with the axes of each tensor in the reverse order in memory."""

    def turn(t: Tensor) -> Tensor:
        axes = [*reversed(range(t.ndim))]
        return t.permute(axes).contiguous().permute(axes)

    return {n: turn(t) if isinstance(t, Tensor) else t for n, t in arguments.items()}
