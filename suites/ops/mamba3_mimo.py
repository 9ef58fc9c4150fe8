"""mamba3_mimo: the scan of Mamba-3 with several inputs and outputs a head.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_mimo import Mamba3MimoState, mamba3_mimo, mamba3_mimo_recurrent, mamba3_mimo_step
from suites.ops import spec
from suites.ops.mamba3_siso import overflow
from suites.ops.spec import Named, Outputs
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
FIXED = ("q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "D")
STATE = Mamba3MimoState._fields
NAMES = (
    "q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "angles", "D", "z",
    "doc_ids", *STATE,
)  # fmt: skip
run, recurrence = spec.flat(mamba3_mimo, Mamba3MimoState), spec.flat(mamba3_mimo_recurrent, Mamba3MimoState)


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
    return spec.scan_dtypes(inputs, dtype, device, ("q", "k", "v", "z"))


def one_rank_each(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: R scans of one rank, each with its own state, and their outputs summed."""
    wrong = 0
    for r in range(inputs["q"].shape[2]):
        ranked = {n: inputs[n][:, :, r : r + 1] for n in ("q", "k", "k_prev")}
        ranked |= {n: inputs[n][:, r : r + 1] for n in FIXED if n != "D"}
        y, *state = run(**inputs | ranked)
        wrong = wrong + y
    return wrong, *state


def ranks_apart(subject: spec.Subject, inputs: Named, right: Outputs) -> Outputs:
    return one_rank_each(**inputs)[0], *right[1:]


def without_last_value(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: the given state without its value and keys."""
    return run(**inputs | {"v_prev": inputs["v_prev"] * 0})


def refusals(**i: Any) -> list[tuple[Named, str]]:
    return [
        ({"v": i["v"][0]}, "v must be"),
        ({"q": i["q"][:, :, :, [0, 1, 0]]}, "H divisible by G"),
        ({"angles": i["angles"].repeat(1, 1, 1, 2)}, "2A <= N"),
        ({n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
        ({n: i[n][:, :, :0] for n in ("q", "k")}, "R >= 1"),
        ({"k": i["k"][..., :-1]}, "k has shape"),
        ({"mimo_out": i["mimo_out"][:, :1]}, "mimo_out has shape"),
        ({"k_prev": i["k_prev"][:, :, :1]}, "state.k_prev has shape"),
        ({"dt": i["dt"].int()}, "dt must be floating"),
        ({"z": i["z"].float()}, "share one dtype"),
        ({"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
        ({"chunk_size": 0}, "chunk_size must be"),
    ]


SPEC = spec.ScanSpec(
    name="mamba3_mimo",
    run=run,
    naive=recurrence,
    inputs=make_inputs,
    names=" ".join(NAMES),
    step=spec.stepped(mamba3_mimo_step, Mamba3MimoState),
    per_token=PER_TOKEN,
    state=STATE,
    turns=("theta",),
    fault=without_last_value,
    overflow=overflow,
    refusals=refusals,
    bad={"T": 6},
    under_autocast=False,
    smallest={"B": 2, "T": 4, "H": 2, "R": 2, "P": 2, "N": 3, "G": 1, "A": 1, "starts": (2,)},
    opcheck={"B": 2, "T": 7, "R": 2, "P": 3, "N": 5, "A": 2, "starts": (4,)},
    odd={"P": 3, "N": 6},
    drawn={"G": st.sampled_from([1, 2, 4]), "R": st.integers(1, 4), "A": st.integers(0, 2), "N": st.just(5)},
    packed=spec.packed(st.sampled_from([4, 8, 16, 32]), st.sampled_from([4, 8, 16]), "fp32"),
    longest=40,
    batch_tokens=12,
    subjects={
        "mamba3_mimo": spec.mamba3_subject(
            make_inputs, run, recurrence, 8, PER_TOKEN, STATE, {"ranks apart": ranks_apart}
        )
    },
    golden=spec.Golden(
        lambda: make_inputs(T=20, H=2, P=4, N=6, G=1, R=2, A=2, starts=(5, 6, 13)),
        ("y", *STATE),
        partial(run, chunk_size=8),
    ),
)
