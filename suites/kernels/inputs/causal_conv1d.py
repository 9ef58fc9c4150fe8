"""Inputs of the causal_conv1d suites.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d
from kernels.causal_conv1d.naive import causal_conv1d_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal

LENGTHS = (9, 1, 2, 13, 5)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(B=2, D=8, W=4, lengths=LENGTHS, dtype=torch.float64, device="cpu", seed=0) -> Inputs:
    """Return random x, weight, bias and documents of these lengths in row 0, rotated by one token per further row; the
    last is padding (-1).
    """
    g = torch.Generator().manual_seed(seed)
    names = [*range(3, 2 + len(lengths)), -1]
    ids = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in zip(names, lengths)])
    doc_ids = torch.stack([ids.roll(row) for row in range(B)])
    shapes = ((B, len(ids), D), (D, W), (D,))
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)


def refusals(x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor) -> list[Refusal]:
    return [
        ((x[0], weight, bias, doc_ids), {}, "2-d"),
        ((x, weight[:3], bias, doc_ids), {}, "weight has shape"),
        ((x, weight[:, :0], bias, doc_ids), {}, "at least one tap"),
        ((x, weight, bias[:3], doc_ids), {}, "bias has shape"),
        ((x, weight, bias, doc_ids[:, 1:]), {}, "doc_ids has shape"),
        ((x.int(), weight, bias, doc_ids), {}, "x must be floating point"),
        ((x, weight, bias, doc_ids.long()), {}, "int32"),
        ((x, weight, bias, doc_ids), {"activation": "relu"}, "choices are"),
    ]


ACTIVATIONS = {name: {"activation": name} for name in ("silu", "none")}
SMALL = {"B": 2, "D": 2, "W": 3, "lengths": (1, 3, 2)}
OP = FormulaOp(
    name="causal_conv1d",
    run=causal_conv1d,
    formula=causal_conv1d_naive,
    make_inputs=make_inputs,
    cases={
        f"W{W}-{name}": Case({"W": W}, options) for W in (1, 2, 3, 4) for name, options in ACTIVATIONS.items()
    },
    gradcheck={name: Case(SMALL, options) for name, options in ACTIVATIONS.items()},
    batches=[{"B": B} for B in (2, 3, 5)],
    dynamic=(0, 3),
    bad={"dtype": torch.float32},
    refusals=refusals,
)
