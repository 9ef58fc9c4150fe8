"""The ratio rule for interpreted kernels: as close to the fp64 reference as the reference in the kernel's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from suites.support.comparison import error
from suites.support.reduce import largest

FACTOR = 3.0
# Relative to the largest entry (for the RMS, to the RMS): a small plain error may be luck, and in fp64 there is none,
# because the plain reference is the oracle itself. So fp64 checks the formulas and not the rounding.
FLOOR = {torch.float64: 1e-12, torch.float32: 4 * 2**-23, torch.float16: 4 * 2**-10}


def outside(
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    oracle: Sequence[Tensor],
    terms: float = 0.0,
    softcap: float | None = None,
) -> dict[int, list[str]]:
    """Return which outputs break the rule, and by how much: max and RMS error over FACTOR times those of the plain
    reference in the same dtype, apart from the floor.

    terms: the minimum size of an output's terms. If they cancel, the output is smaller than their rounding, and the
    plain reference may be exact by luck. softcap: not None if the second output is a logsumexp, whose floor is the
    documented error of 1e-7 softcap of the kernel's "fast" softcap: lost in fp16 weights, but lse is fp32 in both.

    Raises AssertionError if an output differs from the plain one in shape, dtype or strides.
    """
    broken: dict[int, list[str]] = {}
    for i, (ours, theirs, exact) in enumerate(zip(found, plain, oracle, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), i
        assert ours.is_contiguous(), i
        assert ours.isfinite().all(), i
        if not ours.numel():
            continue
        size = exact.double().abs().max().item(), exact.double().square().mean().sqrt().item()
        floors = [FLOOR[ours.dtype] * largest((s, terms)) for s in size]
        if i == 1 and softcap is not None:
            floors = [4e-7 * largest((4.0, softcap))]
        for kind, e, p, floor in zip(("max", "rms"), error(ours, exact), error(theirs, exact), floors):
            allowed = largest((FACTOR * p, floor))
            # An infinite bound comes from a plain formula that overflowed: it bounds nothing.
            if not e <= allowed < math.inf:
                broken.setdefault(i, []).append(f"{kind} error {e:.1e}, allowed {allowed:.1e}")
    return broken
