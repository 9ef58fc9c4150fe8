"""Inputs of the mla suites.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mla import mla
from kernels.mla.naive import mla_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal

NAMES = ("q_nope", "q_rope", "c_kv", "k_rope", "W_uk", "W_uv", "doc_ids")


def make_inputs(
    B=2, T=33, H=3, C=16, P=16, R=8, Pv=32, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, ...]:
    """Return random inputs in the order of NAMES; three documents in row 0 (ids 5, 1, 3), two in the others,
    padding.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = (
        draw(B, T, H, P), draw(B, T, H, R), draw(B, T, C), draw(B, T, R),
        draw(H, P, C) * C**-0.5, draw(H, Pv, C) * C**-0.5,
    )  # fmt: skip
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)


def refusals(*inputs: Tensor) -> list[Refusal]:
    """Return what both forms refuse (mla and mla_absorbed)."""
    named = dict(zip(NAMES, inputs))
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids = inputs
    changes = [
        ({"q_nope": q_nope[0]}, "3-d"),
        ({"c_kv": c_kv[0]}, r"c_kv \(B,T,C\).*2-d"),
        ({"q_rope": q_rope[:, :3]}, "q_rope has shape"),
        ({"k_rope": k_rope[..., :1]}, "k_rope has shape"),
        ({"W_uk": W_uk[:1]}, "W_uk has shape"),
        ({"W_uv": W_uv[..., :3]}, "W_uv has shape"),
        ({"doc_ids": doc_ids[:, :3]}, "doc_ids has shape"),
        ({"W_uv": W_uv.bfloat16()}, "one float dtype"),
        ({"doc_ids": doc_ids.long()}, "int32"),
    ]
    refused = [(tuple((named | changed).values()), {}, words) for changed, words in changes]
    return [*refused, (inputs, {"softcap": -1.0}, "softcap")]


CASES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "softcap and scale": {"softcap": 2.0, "scale": 0.4},
    "not causal": {"causal": False},
}
SMALL = {"B": 1, "T": 5, "H": 2, "C": 3, "P": 2, "R": 2, "Pv": 3}
OP = FormulaOp(
    name="mla",
    run=mla,
    formula=mla_naive,
    make_inputs=make_inputs,
    cases={name: Case(options=options) for name, options in CASES.items()},
    gradcheck={name: Case(SMALL, CASES[name]) for name in ("plain", "softcap and scale")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic=(0, 1, 2, 3, 6),
    compiled={"softcap": 2.0},
    bad={"B": 2, "T": 4, "H": 2, "C": 4, "P": 4, "R": 2, "Pv": 4, "dtype": torch.float32},
    refusals=refusals,
)
