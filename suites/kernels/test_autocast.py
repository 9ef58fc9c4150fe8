"""Ops ignore autocast: under it, forward and backward are bitwise equal to the results without.

Autocast affects the body of a custom op, and would run the fp32 products there in bf16. An op disables it by
op_support.autocast_disabled; here that is also removed, to show that these tests would detect it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import op_support
from suites.ops import specs
from suites.ops.spec import Comparison, ScanSpec
from suites.support.comparison import error, trained
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

COMPARISONS = {
    f"{name} {key}".strip(): one
    for name, spec in specs().items()
    for key, one in spec.comparisons.items()
    if not one.only_on_gpu
}
INLINED = [name for name, spec in specs().items() if isinstance(spec, ScanSpec)]
# The ops with matrix products that would run; m2rnn's lerp rejects a bf16 product with fp32. The other ops have nothing
# that autocast on the CPU would cast.
WOULD_LOSE_DIGITS = [name for name, spec in specs().items() if spec.loses_digits]


def step(function: Callable[..., Any], one: Comparison, device: str) -> list[Tensor]:
    """Run forward and backward under the caller's autocast state; return outputs and gradients."""
    outputs, grads = trained(function, one.draw([*one.cases.values()][-1], torch.float32, device))
    return [*outputs, *grads.values()]


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", COMPARISONS)
def test_autocast_changes_no_bit(lane: Lane, name: str):
    """Of an op, and of the outputs of its other forms, such as the absorbed one that mla decodes with."""
    one = COMPARISONS[name]
    for function in (one.op, *(torch.no_grad()(form) for form in one.forms)):
        plain = step(function, one, lane.device)
        with torch.autocast(lane.device, torch.bfloat16):
            product = torch.eye(2, device=lane.device) @ torch.eye(2, device=lane.device)
            cast = step(function, one, lane.device)
        assert product.dtype == torch.bfloat16
        assert all(map(torch.equal, cast, plain))


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", INLINED)
def test_autocast_does_not_reach_an_inlined_scan(lane: Lane, op: str):
    inputs = specs()[op].named(dtype=torch.float32, device=lane.device)
    inlined = partial(specs()[op].run, impl="eager")
    plain = inlined(**inputs)
    with torch.autocast(lane.device, torch.bfloat16):
        cast = inlined(**inputs)
    assert all(map(torch.equal, cast, plain))


@lanes("cpu")
@pytest.mark.parametrize("op", WOULD_LOSE_DIGITS)
def test_op_loses_precision_without_disabling_autocast(lane: Lane, op: str, monkeypatch: pytest.MonkeyPatch):
    """The control, in each direction. Not every result changes: a state may be a copy of an input."""
    one = COMPARISONS[op]
    outputs = len(one.run(one.example(0)))
    plain = step(one.op, one, lane.device)
    monkeypatch.setattr(op_support, "autocast_disabled", lambda t: nullcontext())
    with torch.autocast(lane.device, torch.bfloat16):
        cast = step(one.op, one, lane.device)
    for part in (slice(outputs), slice(outputs, None)):
        assert largest(error(*both)[0] for both in zip(cast[part], plain[part])) > 1e-3
