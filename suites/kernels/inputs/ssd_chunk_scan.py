"""Inputs of the ssd_chunk_scan suites.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from suites.support.comparison import Named
from suites.support.scans import documents

PER_TOKEN = ("x", "dt", "Bmat", "Cmat", "doc_ids")


def make_inputs(
    B=2, T=50, H=4, P=8, N=8, G=2, dtype=torch.float64, device="cpu", seed=0, starts=(13, 14, 40)
) -> Named:
    """Return random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    wide = torch.promote_types(dtype, torch.float32)
    inputs = {
        "x": draw(B, T, H, P).to(dtype),
        "dt": F.softplus(draw(B, T, H)).to(wide),
        "A": (-torch.rand(H, generator=g, dtype=torch.float64) - 0.05).to(wide),
        "Bmat": draw(B, T, G, N).to(dtype),
        "Cmat": draw(B, T, G, N).to(dtype),
        "D": draw(H).to(wide),
        "doc_ids": documents(B, T, starts),
        "initial_state": draw(B, H, P, N).to(wide),
    }
    return {n: t.to(device) for n, t in inputs.items()}
