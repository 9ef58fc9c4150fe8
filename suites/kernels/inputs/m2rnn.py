"""Inputs of the m2rnn suites, and its entry in the table of scans.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.m2rnn import m2rnn, m2rnn_recurrent, m2rnn_step
from suites.kernels.scan_op import ScanOp, packed
from suites.support.comparison import Named
from suites.support.scans import documents

NAMES = ("q", "k", "v", "W", "f", "doc_ids", "h0")
PER_TOKEN = ("q", "k", "v", "f", "doc_ids")
FLOATS = tuple(n for n in NAMES if n != "doc_ids")


def make_inputs(
    B=2, T=30, H=3, K=6, V=4, dtype=torch.float64, device="cpu", seed=0, starts=(9, 10, 22)
) -> Named:
    """Return random inputs, W of spectral norm 1; a document begins at each of `starts`, three tokens later per row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    W = draw(H, V, V)
    inputs = {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, H, V),
        "W": W / torch.linalg.matrix_norm(W, 2)[:, None, None],
        "f": draw(B, T, H).sigmoid(),
        "doc_ids": documents(B, T, starts),
        "h0": draw(B, H, K, V),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in ("q", "k", "v") else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def step(token: Named, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return m2rnn_step(**token, state=state[0])


def overflow(inputs: Named) -> None:
    """Saturate the candidate."""
    inputs["k"][:, 4::5] = 1e4
    inputs["f"][:, ::7] = 0.0
    inputs["f"][:, 1::7] = 1.0


def without_state(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: a state of zeros."""
    return m2rnn(**inputs | {"h0": inputs["h0"] * 0})


def reordered(inputs: Named, y: Tensor) -> Tensor:
    """Bound the read-out's rounding in another order: cuBLAS selects its kernel by the number of tokens."""
    sums = inputs["q"].double().abs().sum(-1, keepdim=True)  # no entry of h is above 1
    return 14 * 2**-24 * sums + torch.finfo(y.dtype).eps * y.abs()


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "k must be"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T must be"),
    "W": (lambda i: {"W": i["W"][:, :1]}, "W has shape"),
    "state": (lambda i: {"h0": i["h0"].mT}, "h0 has shape"),
    "integer f": (lambda i: {"f": i["f"].int()}, "f must be floating"),
    "mixed dtypes": (lambda i: {"q": i["q"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
}

SCAN = ScanOp(
    name="m2rnn",
    scan=m2rnn,
    recurrence=m2rnn_recurrent,
    step=step,
    make_inputs=make_inputs,
    names=NAMES,
    per_token=PER_TOKEN,
    state=("h0",),
    chunked=False,
    fault=without_state,
    overflow=overflow,
    bad=BAD,
    gradcheck={"B": 2, "T": 5, "H": 2, "K": 3, "V": 2, "starts": (3,)},
    opcheck={"B": 2, "T": 5, "H": 3, "K": 4, "V": 3, "starts": (4,)},
    odd={},
    packed=packed(st.integers(1, 30), st.just(1)),
    packed_tokens=20,
    same_bits_on=("cpu",),
    reordered=reordered,
    longest=40,
    batch_tokens=6,
    saved=1,
    rounding=1e-13,
    rounding_32=1e-4,
)
