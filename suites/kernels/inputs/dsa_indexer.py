"""Inputs of the dsa_indexer suites.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dsa_indexer import dsa_attention, dsa_indexer
from kernels.dsa_indexer.naive import dsa_attention_naive
from suites.kernels.formula_op import Case, FormulaOp, Refusal


def documents(B: int, T: int, device: str) -> Tensor:
    """Return three documents in row 0 (ids 5, 1, 3), two in the others, then padding."""
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids.to(device)


def make_index_inputs(
    B=2, T=33, J=3, width=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, weights of either sign, and documents."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T, J, width), (B, T, width), (B, T, J)
    tensors = (torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return *tensors, documents(B, T, device)


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, K=7, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and the indexer's choice of K keys, so that early queries of a document have fewer."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    indices = dsa_indexer(*make_index_inputs(B=B, T=T, seed=seed), top_k=K).to(device)
    return *(t.to(device, dtype) for t in tensors), indices


def refusals(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> list[Refusal]:
    return [
        ((q, k[:, :, :1].repeat(1, 1, 3, 1), v, indices), {}, "4 query heads"),
        ((q[0], k, v, indices), {}, "3-d"),
        ((q, k[:, :3], v, indices), {}, "k has shape"),
        ((q, k, v[..., :3], indices), {}, "v has shape"),
        ((q, k, v, indices[:, :3]), {}, "indices has shape"),
        ((q, k, v, indices.long()), {}, "int32"),
        ((q, k.bfloat16(), v, indices), {}, "one float dtype"),
        ((q, k, v.bfloat16(), indices), {}, "one float dtype"),
        ((q, k, v, indices), {"softcap": -1.0}, "softcap"),
    ]


CASES = {"plain": {}, "softcap": {"softcap": 2.0}, "softcap and scale": {"softcap": 2.0, "scale": 0.4}}
SMALL = {"B": 1, "T": 6, "Hq": 4, "Hkv": 2, "P": 3, "K": 3}
OP = FormulaOp(
    name="dsa_attention",
    run=dsa_attention,
    formula=dsa_attention_naive,
    make_inputs=make_inputs,
    cases={name: Case(options=options) for name, options in CASES.items()},
    gradcheck={name: Case(SMALL, CASES[name]) for name in ("plain", "softcap and scale")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic=(0, 1, 2, 3),
    compiled={"softcap": 2.0},
    bad={"B": 2, "T": 4, "P": 4, "K": 3, "dtype": torch.float32},
    refusals=refusals,
)
