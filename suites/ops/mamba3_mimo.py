"""mamba3_mimo: the scan of Mamba-3 with several inputs and outputs a head.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_mimo import Mamba3MimoInputs, Mamba3MimoState, mamba3_mimo, mamba3_mimo_step
from suites.ops import mamba3_siso as siso
from suites.ops import spec
from suites.ops.mamba3_siso import PER_TOKEN
from suites.ops.spec import Named, Outputs

STATE = Mamba3MimoState._fields
NAMES = (*Mamba3MimoInputs._fields, *STATE)
RANKED = tuple(n for n in Mamba3MimoInputs.fixed if n != "D")  # weights (H,R,...)
run = spec.flat(mamba3_mimo, Mamba3MimoInputs, Mamba3MimoState)


def make_inputs(B=2, T=30, H=4, R=3, P=6, N=8, G=2, A=3, starts=(9, 10, 22), **more: Any) -> Named:
    """Return random inputs as of mamba3_siso, with R ranks and A angles."""
    return siso.make_inputs(B, T, H, P, N, G, A, starts=starts, ranks=(R,), **more)


def one_rank_each(**inputs: Tensor) -> tuple[Tensor, ...]:
    """A fault: R scans of one rank, each with its own state, and their outputs summed."""
    wrong = 0
    for r in range(inputs["q"].shape[2]):
        ranked = {n: inputs[n][:, :, r : r + 1] for n in ("q", "k", "k_prev")}
        ranked |= {n: inputs[n][:, r : r + 1] for n in RANKED}
        y, *state = run(**inputs | ranked)
        wrong = wrong + y
    return wrong, *state


def ranks_apart(comparison: spec.Comparison, inputs: Named, right: Outputs) -> Outputs:
    return one_rank_each(**inputs)[0], *right[1:]


def refusals(**i: Any) -> list[tuple[Named, str]]:
    return [
        *siso.refusals(**i),
        ({n: i[n][:, :, :0] for n in ("q", "k")}, "R >= 1"),
        ({"mimo_out": i["mimo_out"][:, :1]}, "mimo_out has shape"),
        ({"k_prev": i["k_prev"][:, :, :1]}, "state.k_prev has shape"),
    ]


SPEC = spec.ScanSpec(
    name="mamba3_mimo",
    run=run,
    inputs=make_inputs,
    names=" ".join(NAMES),
    step=spec.stepped(mamba3_mimo_step, Mamba3MimoInputs, Mamba3MimoState),
    per_token=PER_TOKEN,
    state=STATE,
    turns=("theta",),
    # The given state without its value and keys.
    fault=lambda **inputs: run(**inputs | {"v_prev": inputs["v_prev"] * 0}),
    overflow=siso.overflow,
    refusals=refusals,
    bad={"T": 6},
    loses_digits=True,
    batches=[{"B": B, "T": 12} for B in (2, 3, 5)],
    dynamic=" ".join((*PER_TOKEN, *STATE)),
    smallest={"B": 2, "T": 4, "H": 2, "R": 2, "P": 2, "N": 3, "G": 1, "A": 1, "starts": (2,)},
    contract={"N 5": spec.Case({"B": 2, "T": 7, "R": 2, "P": 3, "N": 5, "A": 2, "starts": (4,)})},
    odd={"P": 3, "N": 6},
    drawn={"G": st.sampled_from([1, 2, 4]), "R": st.integers(1, 4), "A": st.integers(0, 2), "N": st.just(5)},
    packed=spec.packed(st.sampled_from([4, 8, 16, 32]), st.sampled_from([4, 8, 16]), "fp32"),
    longest=40,
    free=(*siso.FREE, "mimo_v", "mimo_z", "mimo_out"),
    # The plain formula is the whole row at once. The recurrence is not suitable: it adds its angles one by one, so that
    # neighbours share their errors, and in fp32 its y is 1.8 times as close as that of any parallel sum.
    comparisons=spec.scan_comparison(
        make_inputs,
        partial(run, chunk_size=8),
        PER_TOKEN,
        STATE,
        {"ranks apart": ranks_apart},
        other=partial(run, chunk_size=64, impl="eager"),
        angles=(1,),
    ),
    golden=spec.Golden(
        lambda: make_inputs(T=20, H=2, P=4, N=6, G=1, R=2, A=2, starts=(5, 6, 13)),
        ("y", *STATE),
        partial(run, chunk_size=8),
    ),
)
