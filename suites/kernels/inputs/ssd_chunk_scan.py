"""Inputs of the ssd_chunk_scan suites, a bound of its rounding error, and its entry in the table of scans.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.ssd_chunk_scan import (
    ssd_chunk_scan,
    ssd_chunk_scan_eager,
    ssd_chunk_scan_recurrent,
    ssd_chunk_scan_step,
)
from suites.kernels.scan_op import ScanOp, packed
from suites.support.comparison import Named, doubled
from suites.support.scans import cut, documents

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


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,P) in fp32.

    y is a sum of products. Each goes through at most T + N additions, and T more in its exponent s, where an error of T
    u |s| on a weight exp(s) is at most T u of the undecayed one. So (2 T + N + 16) u times the same scan over absolute
    values, with no decay and no reset, bounds it; 16 for the roundings of single factors.
    """
    sizes = {n: t.abs() if t.is_floating_point() else t * 0 for n, t in doubled(inputs).items()}
    T, N = inputs["x"].shape[1], inputs["Bmat"].shape[3]
    return (2 * T + N + 16) * 2**-24 * ssd_chunk_scan_recurrent(**sizes | {"A": sizes["A"] * 0})[0]


def without_carry(**inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A fault: each chunk of 16 from a zero state, so the quadratic part without the state between chunks."""
    zero = torch.zeros_like(inputs["initial_state"])
    starts = range(0, inputs["x"].shape[1], 16)
    chunks = [cut(inputs, slice(t, t + 16), PER_TOKEN) | {"initial_state": zero} for t in starts]
    parts = [ssd_chunk_scan_eager(**chunk) for chunk in chunks]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


def step(token: Named, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ssd_chunk_scan_step(**token, state=state[0])


def overflow(inputs: Named) -> None:
    inputs["dt"][:, 5::7] = 3e3
    inputs["A"][0] = -80.0


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"x": i["x"][0]}, "x must be"),
    "groups": (lambda i: {"Bmat": i["Bmat"][:, :, [0, 1, 0]]}, "H divisible by G"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "A": (lambda i: {"A": i["A"][:-1]}, "A has shape"),
    "state": (lambda i: {"initial_state": i["initial_state"].mT[..., :1]}, "initial_state has shape"),
    "integer dt": (lambda i: {"dt": i["dt"].int()}, "dt must be floating"),
    "mixed dtypes": (lambda i: {"Cmat": i["Cmat"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    "chunk_size": (lambda i: {"chunk_size": 0}, "chunk_size must be"),
}

SCAN = ScanOp(
    name="ssd_chunk_scan",
    scan=ssd_chunk_scan,
    recurrence=ssd_chunk_scan_recurrent,
    step=step,
    make_inputs=make_inputs,
    names=("x", "dt", "A", "Bmat", "Cmat", "D", "doc_ids", "initial_state"),
    per_token=PER_TOKEN,
    state=("initial_state",),
    fault=without_carry,
    overflow=overflow,
    bad=BAD,
    gradcheck={"B": 2, "T": 5, "H": 2, "P": 2, "N": 2, "G": 1, "starts": (3,)},
    opcheck={"B": 2, "T": 9, "H": 4, "P": 3, "N": 5, "G": 2, "starts": (4,)},
    odd={"P": 3, "N": 5},
    drawn={"G": st.sampled_from([1, 2, 4])},
    packed=packed(st.integers(1, 40), st.sampled_from([4, 16, 64])),
    reordered=lambda inputs, y: 2 * rounding_bound(inputs) if y.dtype == torch.float32 else None,
    rounding=1e-13,
    rounding_32=1e-5,
)
