"""Regressions of torch that a hybrid training stack has met or could meet, as small programs (docs/corpus.md)."""

from suites.features.corpus import (
    attention,
    autograd,
    control_flow,
    guards,
    inductor,
    lowering,
    shapes,
    tracing,
)
from suites.features.corpus.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "attention",
    "autograd",
    "control_flow",
    "guards",
    "inductor",
    "lowering",
    "shapes",
    "tracing",
]
