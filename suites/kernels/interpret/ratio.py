"""The ratio rule for interpreted kernels: as close to the fp64 reference as the reference in the kernel's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from suites.support.comparison import error
from suites.support.reduce import largest

# Never bf16: the interpreter computes on its raw bits without a warning.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
FACTOR = 3.0
# Relative to the largest entry (for the RMS, to the RMS): a small plain error may be luck, and in fp64 there is none,
# because the plain reference is the oracle itself. So fp64 checks the formulas and not the rounding.
FLOOR = {torch.float64: 1e-12, torch.float32: 4 * 2**-23, torch.float16: 4 * 2**-10}


def outside(
    found: Sequence[Tensor], plain: Sequence[Tensor], oracle: Sequence[Tensor], terms: float = 0.0
) -> list[str]:
    """Return which outputs break the rule, and by how much: max and RMS error over FACTOR times those of the plain
    reference in the same dtype, apart from the floor.

    terms: the minimum size of an output's terms. If they cancel, the output is smaller than their rounding, and the
    plain reference may be exact by luck.

    Raises AssertionError if an output differs from the plain one in shape, dtype or strides.
    """
    broken = []
    for i, (ours, theirs, exact) in enumerate(zip(found, plain, oracle, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), i
        assert ours.is_contiguous(), i
        assert ours.isfinite().all(), i
        size = exact.double().abs().max().item(), exact.double().square().mean().sqrt().item()
        for kind, e, p, s in zip(("max", "rms"), error(ours, exact), error(theirs, exact), size):
            allowed = largest((FACTOR * p, FLOOR[ours.dtype] * largest((s, terms))))
            broken += _over(f"output {i}: {kind} error", e, allowed)
    return broken


def lse_outside(lse: Tensor, plain: Tensor, oracle: Tensor, softcap: float) -> list[str]:
    """Return whether lse breaks the rule, and by how much: its largest error over FACTOR times the plain formula's,
    apart from the documented error of 1e-7 softcap of the kernel's "fast" softcap.
    """
    allowed = largest((FACTOR * error(plain, oracle)[0], 4e-7 * largest((4.0, softcap))))
    return _over("lse: error", error(lse, oracle)[0], allowed)


def _over(what: str, found: float, allowed: float) -> list[str]:
    # An infinite bound comes from a plain formula that overflowed: it bounds nothing.
    return [] if found <= allowed < math.inf else [f"{what} {found:.1e}, allowed {allowed:.1e}"]
