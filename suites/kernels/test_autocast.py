"""Ops ignore autocast: under it, forward and backward are bitwise equal to the results without.

Autocast affects the body of a custom op, and would run the fp32 products there in bf16. An op disables it by
op_support.autocast_disabled; here that is also removed, to show that these tests would detect it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import op_support
from suites.ops import specs
from suites.ops.spec import Named, ScanSpec
from suites.support.comparison import error, gradients
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

UNDER_AUTOCAST = {name: spec for name, spec in specs().items() if spec.under_autocast}
OPS = [*UNDER_AUTOCAST]
INLINED = [name for name, spec in UNDER_AUTOCAST.items() if isinstance(spec, ScanSpec)]
# The ops with matrix products that would run; m2rnn's lerp rejects a bf16 product with fp32. The other ops have nothing
# that autocast on the CPU would cast.
WOULD_LOSE_DIGITS = [name for name, spec in UNDER_AUTOCAST.items() if spec.loses_digits]


def make_inputs(op: str, device: str) -> Named:
    """Return fp32 inputs of the op, by name."""
    return specs()[op].named(dtype=torch.float32, device=device)


def step(op: str, device: str) -> list[Tensor]:
    """Run the op forward and backward under the caller's autocast state; return outputs and gradients."""
    inputs = make_inputs(op, device)
    return gradients(lambda *t: specs()[op].run(**dict(zip(inputs, t))), *inputs.values())


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(lane: Lane, op: str):
    plain = step(op, lane.device)
    with torch.autocast(lane.device, torch.bfloat16):
        product = torch.eye(2, device=lane.device) @ torch.eye(2, device=lane.device)
        cast = step(op, lane.device)
    assert product.dtype == torch.bfloat16
    assert all(map(torch.equal, cast, plain))


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", INLINED)
def test_autocast_does_not_reach_an_inlined_scan(lane: Lane, op: str):
    inputs = make_inputs(op, lane.device)
    inlined = partial(specs()[op].run, impl="eager")
    plain = inlined(**inputs)
    with torch.autocast(lane.device, torch.bfloat16):
        cast = inlined(**inputs)
    assert all(map(torch.equal, cast, plain))


@lanes("cpu")
@pytest.mark.parametrize("op", WOULD_LOSE_DIGITS)
def test_op_loses_precision_without_disabling_autocast(lane: Lane, op: str, monkeypatch: pytest.MonkeyPatch):
    """The control. Not every result changes: a state may be a copy of an input."""
    plain = step(op, lane.device)
    monkeypatch.setattr(op_support, "autocast_disabled", lambda t: nullcontext())
    with torch.autocast(lane.device, torch.bfloat16):
        cast = step(op, lane.device)
    assert largest(error(ours, exact)[0] for ours, exact in zip(cast, plain)) > 1e-3


@lanes("cpu")
@pytest.mark.parametrize("switch", ["present", "removed"])
@pytest.mark.parametrize("op", OPS)
def test_forward_and_backward_run_with_autocast_off(
    lane: Lane, op: str, switch: str, monkeypatch: pytest.MonkeyPatch
):
    """Records whether autocast is on in each op's math, then runs the math without it, so that no bit changes."""
    module = import_module(f"kernels.{op}.op")
    seen = {"forward": set(), "backward": set()}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            direction = "backward" if "backward" in function.__name__ else "forward"
            seen[direction].add(torch.is_autocast_enabled(lane.device))
            with torch.autocast(lane.device, enabled=False):
                return function(*args)

        return run

    for name, function in vars(module).copy().items():
        if inspect.isfunction(function) and function.__module__ == f"kernels.{op}.eager":
            monkeypatch.setattr(module, name, watched(function))
    if switch == "removed":
        monkeypatch.setattr(op_support, "autocast_disabled", lambda t: nullcontext())
    with torch.autocast(lane.device, torch.bfloat16):
        step(op, lane.device)
    autocast_is_on = switch == "removed"
    assert seen == {"forward": {autocast_is_on}, "backward": {autocast_is_on}}
