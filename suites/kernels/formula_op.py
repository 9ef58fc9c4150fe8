"""What the laws of the ops with a plain formula (suites/kernels/test_formulas.py) need to know of one of them.

The plain formula is the op's naive.py, differentiated by autograd. The scan ops are in scan_op.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Named = Mapping[str, Any]
# Arguments of the op, its options, and words of the error that they raise.
Refusal = tuple[Sequence[Any], Named, str]


@dataclass(frozen=True)
class Case:
    """inputs: arguments of make_inputs. options: keyword arguments of the op and of its plain formula."""

    inputs: Named = field(default_factory=dict)
    options: Named = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FormulaOp:
    """One op: how it is called, and what is particular to it.

    name: in torch.ops.bumpgate, without its direction, and in error messages. run: the op's function, with `impl`.
    formula: its plain formula. make_inputs: the positional arguments of both. forms: the values of `impl` that must
    equal the formula, in fp64 within `rounding`.
    """

    name: str
    run: Callable[..., Any]
    formula: Callable[..., Any]
    make_inputs: Callable[..., tuple[Any, ...]]
    cases: Mapping[str, Case]
    gradcheck: Mapping[str, Case]
    # One compiled graph serves all these inputs, whose arguments in the positions `dynamic` have another first axis.
    batches: Sequence[Named] = ()
    dynamic: Sequence[int] = ()
    compiled: Named = field(default_factory=dict)
    # Arguments of make_inputs for `refusals`, which gets its result.
    bad: Named = field(default_factory=dict)
    refusals: Callable[..., Sequence[Refusal]]
    forms: Sequence[str] = ("op", "eager")
    rounding: float = 1e-12
