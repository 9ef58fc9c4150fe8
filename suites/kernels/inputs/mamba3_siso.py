"""Inputs of the mamba3_siso suites.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation. A third one, the
published whole-sequence form, is written here, with two incorrect readings of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mamba3_siso import Mamba3State, mamba3_siso, mamba3_siso_recurrent
from kernels.ssd_chunk_scan import ssd_chunk_scan_reference
from suites.support.comparison import Named
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
STATE = Mamba3State._fields
NAMES = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "D", "z", "doc_ids", *STATE)
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
NARROW = ("q", "k", "v", "z")
Scan = Callable[..., tuple[Tensor, ...]]


def flat(scan: Callable[..., tuple[Tensor, Mamba3State]], **options: object) -> Scan:
    """Wrap the scan to take flat keyword tensors, including any state, and return (y, theta, h, k_prev, v_prev)."""

    def run(**inputs: Tensor) -> tuple[Tensor, ...]:
        state = Mamba3State(*(inputs.pop(n) for n in STATE))
        y, final = scan(**inputs, state=state, **options)
        return y, *final

    return run


op, recurrence = flat(mamba3_siso), flat(mamba3_siso_recurrent)


def make_inputs(
    B=2, T=50, H=4, P=8, N=8, G=2, R=3, dtype=torch.float64, device="cpu", seed=0, starts=(13, 14, 40)
) -> Named:
    """Return random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    dt = F.softplus(draw(B, T, H))
    inputs = {
        "q": draw(B, T, G, N),
        "k": draw(B, T, G, N),
        "v": draw(B, T, H, P),
        "adt": -dt * (0.05 + torch.rand(B, T, H, generator=g, dtype=torch.float64)),
        "dt": dt,
        "trap": draw(B, T, H),
        "q_bias": draw(H, N),
        "k_bias": draw(H, N),
        "angles": draw(B, T, H, R),
        "D": draw(H),
        "z": draw(B, T, H, P),
        "doc_ids": documents(B, T, starts),
        "theta": 2 * math.pi * torch.rand(B, H, R, generator=g, dtype=torch.float64),
        "h": draw(B, H, P, N),
        "k_prev": draw(B, H, N),
        "v_prev": draw(B, H, P),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in NARROW else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def on_circle(angle: Tensor) -> Tensor:
    """Return the point at an angle: angles are equal up to full turns."""
    return torch.polar(torch.ones_like(angle), angle)


def biased(inputs: Named, name: str) -> Tensor:
    """Return q or k with its bias, for each head: (B,T,H,N)."""
    x, H = inputs[name], inputs["v"].shape[2]
    return x.repeat_interleave(H // x.shape[2], 2) + inputs[f"{name}_bias"]


def trapezoid(inputs: Named) -> tuple[Tensor, Tensor]:
    """Return a token's weight in later ones, lam dt + next (1-lam) dt, and the second term alone: (B,T,H) both."""
    lam = inputs["trap"].sigmoid()
    shifted = F.pad((inputs["dt"] * (1 - lam))[:, 1:], (0, 0, 0, 1))
    return lam * inputs["dt"] + shifted, shifted


def scaled_k_in_mamba2(inputs: Named) -> Tensor:
    """A fault: scale k, and pass -adt as dt to the Mamba-2 scan, which then weights v with it as well."""
    i, (scale, _) = inputs, trapezoid(inputs)
    q, k = biased(i, "q"), biased(i, "k") * scale[..., None]
    y, _ = ssd_chunk_scan_reference(i["v"], -i["adt"], -torch.ones_like(i["D"]), k, q, i["D"], i["doc_ids"])
    return y * F.silu(i["z"])
