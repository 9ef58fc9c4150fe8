"""Inputs of the mamba3_mimo suites.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mamba3_mimo import Mamba3MimoState, mamba3_mimo, mamba3_mimo_recurrent
from suites.support.comparison import Named
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
FIXED = ("q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "D")
STATE = Mamba3MimoState._fields
NAMES = (
    "q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "angles", "D", "z",
    "doc_ids", *STATE,
)  # fmt: skip


FLOATS = tuple(n for n in NAMES if n != "doc_ids")
NARROW = ("q", "k", "v", "z")
Scan = Callable[..., tuple[Tensor, ...]]


def flat(scan: Callable[..., tuple[Tensor, Mamba3MimoState]], **options: object) -> Scan:
    """Wrap the scan to take flat keyword tensors, including any state, and return (y, theta, h, k_prev, v_prev)."""

    def run(**inputs: Tensor) -> tuple[Tensor, ...]:
        state = Mamba3MimoState(*(inputs.pop(n) for n in STATE))
        y, final = scan(**inputs, state=state, **options)
        return y, *final

    return run


op, recurrence = flat(mamba3_mimo), flat(mamba3_mimo_recurrent)


def make_inputs(
    B=2, T=30, H=4, R=3, P=6, N=8, G=2, A=3, dtype=torch.float64, device="cpu", seed=0, starts=(9, 10, 22)
) -> Named:
    """Return random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    dt = F.softplus(draw(B, T, H))
    inputs = {
        "q": draw(B, T, R, G, N),
        "k": draw(B, T, R, G, N),
        "v": draw(B, T, H, P),
        "adt": -dt * (0.05 + torch.rand(B, T, H, generator=g, dtype=torch.float64)),
        "dt": dt,
        "trap": draw(B, T, H),
        "q_bias": draw(H, R, N),
        "k_bias": draw(H, R, N),
        "mimo_v": draw(H, R, P),
        "mimo_z": draw(H, R, P),
        "mimo_out": draw(H, R, P),
        "angles": draw(B, T, H, A),
        "D": draw(H),
        "z": draw(B, T, H, P),
        "doc_ids": documents(B, T, starts),
        "theta": 2 * math.pi * torch.rand(B, H, A, generator=g, dtype=torch.float64),
        "h": draw(B, H, P, N),
        "k_prev": draw(B, H, R, N),
        "v_prev": draw(B, H, P),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in NARROW else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def on_circle(angle: Tensor) -> Tensor:
    """Return the point at an angle: angles are equal up to full turns."""
    return torch.polar(torch.ones_like(angle), angle)


def one_rank_each(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: R scans of one rank, each with its own state, and their outputs summed."""
    wrong = 0
    for r in range(inputs["q"].shape[2]):
        ranked = {n: inputs[n][:, :, r : r + 1] for n in ("q", "k", "k_prev")}
        ranked |= {n: inputs[n][:, r : r + 1] for n in FIXED if n != "D"}
        y, *state = op(**inputs | ranked)
        wrong = wrong + y
    return wrong, *state
