"""Inputs of the attention suites.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first: the op folds the
heads into one product and rebuilds its softmax from the logsumexp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.attention.naive import attention_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and documents: three of them in row 0 (ids 5, 1, 3), two in the others, then padding."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)


def refusals(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> list[Refusal]:
    return [
        ((q, k[:, :, :1].repeat(1, 1, 3, 1), v, doc_ids), {}, "4 query heads"),
        ((q[0], k, v, doc_ids), {}, "3-d"),
        ((q, k[:, :3], v, doc_ids), {}, "k has shape"),
        ((q, k, v[..., :3], doc_ids), {}, "v has shape"),
        ((q, k, v, doc_ids[:, :3]), {}, "doc_ids has shape"),
        ((q, k.bfloat16(), v, doc_ids), {}, "one float dtype"),
        ((q, k, v, doc_ids.long()), {}, "int32"),
        ((q, k, v, doc_ids), {"softcap": -1.0}, "softcap"),
        ((q, k, v, doc_ids), {"window": -1}, "window"),
    ]


CASES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 5},
    "all": {"softcap": 2.0, "window": 7, "scale": 0.4},
    "not causal": {"causal": False},
}
SMALL = {"B": 1, "T": 6, "Hq": 4, "Hkv": 2, "P": 3}
OP = FormulaOp(
    name="attention",
    run=attention,
    formula=attention_naive,
    make_inputs=make_inputs,
    cases={name: Case(options=options) for name, options in CASES.items()},
    gradcheck={name: Case(SMALL, CASES[name]) for name in ("plain", "all")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic=(0, 1, 2, 3),
    compiled={"softcap": 2.0},
    bad={"B": 2, "T": 4, "Hq": 4, "Hkv": 2, "P": 4, "dtype": torch.float32},
    refusals=refusals,
)
