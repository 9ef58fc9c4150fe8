"""Faults that every op can have: wrong results that the ratio rule must reject. The specs add an op's own faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from suites.ops import specs
from suites.ops.spec import Comparison, Named, Outputs

Fault = Callable[[Comparison, Named, Outputs], Outputs]


def comparisons() -> dict[str, Comparison]:
    """Return the comparisons of all ops with their plain formulas, by name."""
    return {
        f"{spec.name} {name}".strip(): one
        for spec in specs().values()
        for name, one in spec.comparisons.items()
        if not one.only_on_gpu
    }


def faults(comparison: Comparison) -> Mapping[str, Fault]:
    """Return the faults that every op can have, and the faults of this one."""
    return EVERY_OP | dict(comparison.faults)


def _first(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return the fault that changes a copy of the first output only."""
    return lambda comparison, inputs, right: (change(right[0].clone()), *right[1:])


def _one_wrong_element(y: Tensor) -> Tensor:
    """Change the entry of median size by 1 %. Zeros do not count: a factor of 1.01 would not change them."""
    sizes = y.abs().flatten()
    used = sizes.nonzero().flatten()
    y.view(-1)[used[sizes[used].argsort()[len(used) // 2]]] *= 1.01
    return y


def _zeroed_tail(y: Tensor) -> Tensor:
    """Leave the last token unwritten; of dispatched tokens, the last row of each expert; of a product, a column."""
    y[:, -1] = 0
    return y


def _tf32_operands(comparison: Comparison, inputs: Named, right: Outputs) -> Outputs:
    """Round operands as a Triton product of fp32 does by default: 10 bits of each factor."""
    return comparison.run({n: _tf32(t) for n, t in inputs.items()})


def _tf32(t: Any) -> Any:
    if not isinstance(t, Tensor) or t.dtype != torch.float32:
        return t
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


EVERY_OP: dict[str, Fault] = {
    "3 % scale": _first(lambda y: y * 1.03),
    "one wrong element": _first(_one_wrong_element),
    "zeroed tail": _first(_zeroed_tail),
    "tf32 operands": _tf32_operands,
}
