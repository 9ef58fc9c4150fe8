"""Inputs of the rms_norm_gated suites.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rms_norm_gated import rms_norm_gated
from kernels.rms_norm_gated.naive import rms_norm_gated_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(shape=(2, 9), D=64, dtype=torch.float64, device="cpu", seed=0) -> Inputs:
    """Return random x and gate (..., D) and a weight near 1."""
    g = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(*shape, D, generator=g, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)
    return tuple(t.to(device, dtype) for t in (x, gate, weight))


def refusals(x: Tensor, gate: Tensor, weight: Tensor) -> list[Refusal]:
    return [
        ((x, gate[:1], weight), {}, "gate has shape"),
        ((x, gate, weight[1:]), {}, "weight has shape"),
        ((x[0, 0, 0], gate, weight), {}, "0-d"),
        ((x.int(), gate, weight), {}, "x must be floating point"),
        ((x, gate.int(), weight), {}, "gate must be floating point"),
        ((x, gate, weight), {"group_size": 7}, "do not split"),
        ((x, gate, weight), {"group_size": 0}, "do not split"),
        ((x, gate, weight), {"eps": -1.0}, "eps"),
    ]


def options(S: int | None, before: bool) -> dict[str, object]:
    return {"group_size": S, "norm_before_gate": before}


CASES = {
    f"{'norm first' if before else 'gate first'}, groups of {S}": options(S, before)
    for S in (None, 16, 4)
    for before in (False, True)
}
OP = FormulaOp(
    name="rms_norm_gated",
    run=rms_norm_gated,
    formula=rms_norm_gated_naive,
    make_inputs=make_inputs,
    cases={name: Case(options=chosen) for name, chosen in CASES.items()},
    gradcheck={
        f"{before}, groups of {S}": Case({"shape": (2, 3), "D": 4}, options(S, before))
        for S in (None, 2)
        for before in (False, True)
    },
    batches=[{"shape": (B, 7)} for B in (2, 3, 5)],
    dynamic=(0, 1),
    compiled={"group_size": 16},
    bad={"dtype": torch.float32},
    refusals=refusals,
)
