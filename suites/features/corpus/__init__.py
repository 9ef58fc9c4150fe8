"""Regressions of torch that a hybrid training stack has met or could meet, as small programs."""

from suites.features.corpus import (
    attention,
    autograd,
    control_flow,
    guards,
    held_out_inductor,
    held_out_tracing,
    inductor,
    lowering,
    shapes,
    tracing,
)
from suites.features.corpus.case import CASES, Case

__all__ = [
    "CASES",
    "HELD_OUT",
    "Case",
    "attention",
    "autograd",
    "control_flow",
    "guards",
    "held_out_inductor",
    "held_out_tracing",
    "inductor",
    "lowering",
    "shapes",
    "tracing",
]

# The cases that were collected after the gate and the bisect were built: neither was changed for them.
HELD_OUT: tuple[str, ...] = tuple(
    case.name
    for case in CASES
    if case.find.__module__ in (held_out_inductor.__name__, held_out_tracing.__name__)
)
