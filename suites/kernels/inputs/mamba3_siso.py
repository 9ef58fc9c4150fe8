"""Inputs of the mamba3_siso suites, a bound of its rounding error, and its entry in the table of scans.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_siso import Mamba3State, mamba3_siso, mamba3_siso_recurrent, mamba3_siso_step
from kernels.ssd_chunk_scan import ssd_chunk_scan_eager
from suites.kernels.scan_op import ScanOp, flat, packed, stepped
from suites.support.comparison import Named, doubled
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
STATE = Mamba3State._fields
NAMES = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "D", "z", "doc_ids", *STATE)
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
NARROW = ("q", "k", "v", "z")
op, recurrence = flat(mamba3_siso, Mamba3State), flat(mamba3_siso_recurrent, Mamba3State)


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
    y, _ = ssd_chunk_scan_eager(i["v"], -i["adt"], -torch.ones_like(i["D"]), k, q, i["D"], i["doc_ids"])
    return y * F.silu(i["z"])


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,P) in fp32.

    y is a sum over tokens of products of norms |q_t| |k_s| |v_s|. Each goes through at most T + N additions, T more in
    its exponent (T u |s| on a weight exp(s) is at most T u of the undecayed one), and two angles. An angle is a sum of
    T terms: pi u per term for the addition, and 4 pi u dt for the term, 28 u for dt below 2. 16 u more for the
    roundings of single factors.
    """
    i = doubled(inputs)
    T, N = i["q"].shape[1], i["q"].shape[3]
    query, key = (biased(i, n).norm(dim=-1)[..., None] for n in "qk")
    before = (
        i["h"].norm(dim=-1) + i["dt"][:, 0, :, None] * i["k_prev"].norm(dim=-1)[..., None] * i["v_prev"].abs()
    )
    twice = i["dt"] + F.pad(i["dt"][:, 1:], (0, 0, 0, 1))
    sums = before[:, None] + (twice[..., None] * key * i["v"].abs()).cumsum(1)
    size = (query * sums + i["D"].abs()[:, None] * i["v"].abs()) * F.silu(i["z"]).abs()
    return (58 * T + N + 16) * 2**-24 * size


def without_last_value(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: the given state without its v_prev k_prev^T."""
    return op(**inputs | {"v_prev": inputs["v_prev"] * 0})


def overflow(inputs: Named) -> None:
    inputs["adt"][:, 5::7] = -3e4
    inputs["adt"][:, 8, 0] = -float("inf")


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "v must be"),
    "groups": (lambda i: {"q": i["q"][:, :, [0, 1, 0]]}, "H divisible by G"),
    "angles": (lambda i: {"angles": i["angles"].repeat(1, 1, 1, 2)}, "2R <= N"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "k": (lambda i: {"k": i["k"][..., :-1]}, "k has shape"),
    "state": (lambda i: {"h": i["h"][:, :1]}, "state.h has shape"),
    "integer dt": (lambda i: {"dt": i["dt"].int()}, "dt must be floating"),
    "mixed dtypes": (lambda i: {"z": i["z"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    "chunk_size": (lambda i: {"chunk_size": 0}, "chunk_size must be"),
}

SCAN = ScanOp(
    name="mamba3_siso",
    scan=op,
    recurrence=recurrence,
    step=stepped(mamba3_siso_step, Mamba3State),
    make_inputs=make_inputs,
    names=NAMES,
    per_token=PER_TOKEN,
    state=STATE,
    turns=("theta",),
    fault=without_last_value,
    overflow=overflow,
    bad=BAD,
    gradcheck={"B": 2, "T": 5, "H": 2, "P": 2, "N": 3, "G": 1, "R": 1, "starts": (3,)},
    opcheck={"B": 2, "T": 9, "H": 4, "P": 3, "N": 5, "G": 2, "R": 2, "starts": (4,)},
    odd={"P": 3, "N": 6},
    drawn={"G": st.sampled_from([1, 2, 4]), "R": st.integers(0, 2), "N": st.just(5)},
    packed=packed(st.integers(1, 40), st.sampled_from([4, 16, 64])),
    reordered=lambda inputs, y: 2 * rounding_bound(inputs) if y.dtype == torch.float32 else None,
)
