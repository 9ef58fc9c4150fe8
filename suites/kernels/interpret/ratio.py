"""The ratio rule for interpreted kernels: as close to the fp64 reference as the reference in the kernel's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suites.support.comparison import error

# Never bf16: the interpreter computes on its raw bits and says nothing.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
FACTOR = 3.0
# Of the largest entry (for the RMS, of the RMS): a small plain error may be luck, and in fp64 there is none, the
# plain reference being the oracle itself. So fp64 proves the formulas and not the rounding.
FLOOR = {torch.float64: 1e-12, torch.float32: 4 * 2**-23, torch.float16: 4 * 2**-10}


def outside(
    found: Sequence[Tensor], plain: Sequence[Tensor], oracle: Sequence[Tensor], terms: float = 0.0
) -> list[str]:
    """Which outputs break the rule, and by how much: max and RMS error over FACTOR times those of the plain
    reference in the same dtype, but for the floor.

    terms: the size that an output's terms have at least. Where they cancel, the output is smaller than their rounding,
    and the plain reference may be exact by luck.

    Raises AssertionError where an output differs from the plain one in shape, dtype or strides.
    """
    broken = []
    for i, (ours, theirs, exact) in enumerate(zip(found, plain, oracle, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), i
        assert ours.is_contiguous(), i
        assert ours.isfinite().all(), i
        size = exact.double().abs().max().item(), exact.double().square().mean().sqrt().item()
        for kind, e, p, s in zip(("max", "rms"), error(ours, exact), error(theirs, exact), size):
            allowed = max(FACTOR * p, FLOOR[ours.dtype] * max(s, terms))
            if not e <= allowed:
                broken.append(f"output {i}: {kind} error {e:.1e}, allowed {allowed:.1e}")
    return broken
