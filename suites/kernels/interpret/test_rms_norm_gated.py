"""The Triton kernels of rms_norm_gated under the interpreter: inputs with more than two axes."""

from __future__ import annotations

import torch

from suites.ops import interpreted
from suites.support.lanes import Lane, lanes

OP = interpreted()["rms_norm_gated"]


@lanes("cpu")
def test_leading_axes_are_rows(lane: Lane):
    inputs = OP.example("fp32", 12, 8)
    unflat = inputs | {n: inputs[n].unflatten(0, (3, 4)) for n in ("x", "gate", "dy")}
    options = {"group_size": 8, "norm_before_gate": False}
    flat, split = (OP.launched(**given, **options) for given in (inputs, unflat))
    assert split[0].shape == (3, 4, 8)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(split, flat))
