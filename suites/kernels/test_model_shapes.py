"""The ops on an H200 at the model's shapes: their error beside that of the plain formula, then their speed.

The oracle is the reference in fp64. The plain formula is the reference with the operands of its matrix products in
bf16, as a tensor core takes them. B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from suites.kernels.peer_tuning import TUNED, keep_winners
from suites.kernels.workloads import BF16, CASES, Case
from suites.support.comparison import AT_MOST, doubled, error_ratio, gradients, ratio_row
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn


def timed_case(name: str, B: int) -> Case:
    """The case, with its peer tuned as it was at its best."""
    torch.manual_seed(0)
    case = CASES[name](B)
    if case.peer and name.startswith(TUNED):
        keep_winners()
    return case


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """The oracles take tens of GB; what torch keeps of them is missing to the other workers."""
    yield
    torch.cuda.empty_cache()


@lanes("h200")
@pytest.mark.parametrize("name", CASES)
def test_error(lane: Lane, name: str, row, exclusive_machine) -> None:
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
def test_speed(lane: Lane, name: str, speed) -> None:
    speed(name, timed_case(name, B=4))
