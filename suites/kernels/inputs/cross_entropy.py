"""Inputs of the cross_entropy suites.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cross_entropy import cross_entropy
from kernels.cross_entropy.naive import cross_entropy_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal


def make_inputs(
    B=3, T=5, V=37, dtype=torch.float64, device="cpu", seed=0, ignore_index=-100, scale=2.0
) -> tuple[Tensor, Tensor]:
    """Return random logits (B,T,V) and targets (B,T), of which two are ignored in row 0 and one in the last row."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * scale
    target = torch.randint(0, V, (B, T), generator=g)
    target[0, :2] = target[-1, -1] = ignore_index
    return logits.to(device, dtype), target.to(device)


def refusals(logits: Tensor, target: Tensor) -> list[Refusal]:
    return [
        ((logits, target[:2]), {}, "target has shape"),
        ((logits[0, 0], target), {}, "target has shape"),
        ((logits[..., :0], target), {}, "V at least 1"),
        ((logits.sum(), target), {}, "V at least 1"),
        ((logits.int(), target), {}, "logits must be floating point"),
        ((logits, target.int()), {}, "int64"),
        ((logits, target), {"softcap": -1.0}, "softcap"),
        ((logits, target), {"impl": "upstream"}, "choices are"),
    ]


CASES = {"plain": 0.0, "softcap": 3.0, "wide softcap": 50.0}
OP = FormulaOp(
    name="cross_entropy",
    run=cross_entropy,
    formula=cross_entropy_naive,
    make_inputs=make_inputs,
    cases={
        f"{name}, ignoring {i}": Case({"ignore_index": i}, {"softcap": softcap, "ignore_index": i})
        for name, softcap in CASES.items()
        for i in (-100, -1, 3)
    },
    gradcheck={f"softcap {c}": Case({"B": 2, "T": 3, "V": 4}, {"softcap": c}) for c in (0.0, 1.5)},
    batches=[{"B": B} for B in (2, 3, 5)],
    dynamic=(0, 1),
    compiled={"softcap": 15.0},
    bad={"dtype": torch.float32},
    refusals=refusals,
)
