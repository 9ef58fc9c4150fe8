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
from kernels.attention import attention
from kernels.causal_conv1d import causal_conv1d
from kernels.cross_entropy import cross_entropy
from kernels.grouped_gemm import grouped_gemm
from kernels.m2rnn import m2rnn
from kernels.mamba3_siso import Mamba3State, mamba3_siso
from kernels.mla import mla
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan
from suites.kernels.scan_op import flat
from suites.support.comparison import error, gradients
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

OPS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "causal_conv1d": causal_conv1d,
    "cross_entropy": cross_entropy,
    "grouped_gemm": grouped_gemm,
    "m2rnn": m2rnn,
    "mamba3_siso": flat(mamba3_siso, Mamba3State),
    "mla": mla,
    "moe_combine": moe_combine,
    "moe_dispatch": partial(moe_dispatch, num_experts=5, bucket=4),
    "rms_norm_gated": rms_norm_gated,
    "ssd_chunk_scan": ssd_chunk_scan,
}
INLINED = {
    "m2rnn": partial(m2rnn, impl="eager"),
    "mamba3_siso": flat(mamba3_siso, Mamba3State, impl="eager"),
    "ssd_chunk_scan": partial(ssd_chunk_scan, impl="eager"),
}
# The ops with matrix products that would run; m2rnn's lerp rejects a bf16 product with fp32. The other ops have nothing
# that autocast on the CPU would cast.
WOULD_LOSE_DIGITS = ("attention", "grouped_gemm", "mamba3_siso", "mla", "ssd_chunk_scan")


def make_inputs(op: str, device: str) -> Any:
    """Return the fp32 inputs of the op's suite: its tensors in order, or by name."""
    return import_module(f"suites.kernels.inputs.{op}").make_inputs(dtype=torch.float32, device=device)


def step(op: str, device: str) -> list[Tensor]:
    """Run the op forward and backward under the caller's autocast state; return outputs and gradients."""
    inputs = make_inputs(op, device)
    if isinstance(inputs, dict):
        return gradients(lambda *t: OPS[op](**dict(zip(inputs, t))), *inputs.values())
    return gradients(OPS[op], *inputs)


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
    plain = INLINED[op](**inputs)
    with torch.autocast(lane.device, torch.bfloat16):
        cast = INLINED[op](**inputs)
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
