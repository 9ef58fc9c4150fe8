"""The ops on an H200 at the model's shapes: their error beside that of the plain formula, then their speed.

The oracle is the reference in fp64. The plain formula is the reference with the operands of its matrix products in
bf16, as a tensor core takes them. B batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from suites.kernels.peer_tuning import TUNED, keep_winners
from suites.kernels.workloads import BF16, CASES, Case
from suites.support.comparison import AT_MOST, doubled, error_ratio, gradients, ratio_row
from suites.support.gpu_timing import forward_and_backward
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

# Compiling and choosing of configurations included; upstream's Mamba-3 tunes for 130 s.
LONGEST_FIRST_CALL = 20


def timed_case(name: str, B: int) -> Case:
    """The case, with its peer tuned as it was at its best."""
    torch.manual_seed(0)
    case = CASES[name](B)
    if case.peer and name.startswith(TUNED):
        keep_winners()
    return case


@lanes("h200")
@pytest.mark.parametrize("name", CASES)
def test_error(lane: Lane, name: str, row, most_gpu_memory) -> None:
    case = timed_case(name, B=1)
    exact = gradients(case.reference, *doubled(case.inputs))
    with OperandsIn(BF16):
        plain = gradients(case.reference, *case.inputs)

    def ratios(function: Callable[..., Any]) -> list[float]:
        return [
            error_ratio(*three) for three in zip(gradients(function, *case.inputs), plain, exact, strict=True)
        ]

    ours, peer = ratios(case.op), ratios(case.peer) if case.peer else []
    outputs = len(ours) - sum(t.is_floating_point() for t in case.inputs)
    parts = {"forward": slice(0, outputs), "gradient": slice(outputs, None)}
    for way, part in parts.items():
        found = {f"{way} {i}": ratio for i, ratio in enumerate(ours[part])}
        found_by_peer = [f"peer {ratio:.3f}" for ratio in peer[part]]
        witness = sum(t.numel() for t in exact[part])
        ratio_row(row, f"kernels/{name}/{way}_error_ratio", found, witness, AT_MOST[way], found_by_peer)


@lanes("h200")
@pytest.mark.parametrize("name", CASES)
def test_first_call(lane: Lane, name: str, row, most_gpu_memory) -> None:
    """A user waits for it once. What it and the peer compile is on disk when their speed is measured."""
    case = timed_case(name, B=4)
    started = time.perf_counter()
    forward_and_backward(case.op, case.inputs)[1]()
    torch.cuda.synchronize()
    row(
        f"kernels/{name}/first_call_seconds", time.perf_counter() - started, unit="s", witness=1, rule="C36",
        at_most=LONGEST_FIRST_CALL, evidence=["forward and backward, on the caches that this run found"],
    )  # fmt: skip
    if case.peer:
        forward_and_backward(case.peer, case.inputs)[1]()


@lanes("h200")
@pytest.mark.parametrize("name", CASES)
def test_speed(lane: Lane, name: str, speed) -> None:
    speed(name, timed_case(name, B=4))
