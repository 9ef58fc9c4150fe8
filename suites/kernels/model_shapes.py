"""Errors of an op and of its peer at the model's shapes, relative to those of the plain formula. B batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.kernels.peer_tuning import tuned_case
from suites.ops.spec import BF16
from suites.support.comparison import doubled, error_ratio, gradients
from suites.support.operands import OperandsIn


def compared(name: str) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, int]]:
    """Return error ratios of the op and of its peer, by "forward" and "gradient", and the number of values compared."""
    case = tuned_case(name, B=1)
    exact = gradients(case.reference, *doubled(case.inputs))
    with OperandsIn(BF16):
        plain = gradients(case.reference, *case.inputs)

    def ratios(function: Callable[..., Any] | None) -> list[float]:
        if function is None:
            return []
        found = gradients(function, *case.inputs)
        return [error_ratio(*three) for three in zip(found, plain, exact, strict=True)]

    outputs = len(exact) - sum(t.is_floating_point() for t in case.inputs)
    parts = {"forward": slice(0, outputs), "gradient": slice(outputs, None)}
    ours, peer = (
        {way: ratio[part] for way, part in parts.items()} for ratio in map(ratios, (case.op, case.peer))
    )
    return ours, peer, {way: sum(t.numel() for t in exact[part]) for way, part in parts.items()}
