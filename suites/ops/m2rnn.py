"""m2rnn: a recurrence with a matrix state and a tanh.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.m2rnn import m2rnn, m2rnn_step
from kernels.m2rnn.eager import m2rnn_backward_eager, m2rnn_forward_with_states
from suites.ops import spec
from suites.ops.spec import Named, Outputs
from suites.support.comparison import doubled
from suites.support.reduce import largest
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "f", "doc_ids")


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
    return spec.scan_dtypes(inputs, dtype, device, ("q", "k", "v"))


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


def rounding_bound(i: Named, exact: Named) -> Named:
    """Bound the rounding error of y (B,T,H,V) in fp32, for W of spectral norm 1.

    A step then does not amplify a row error of h, so T steps add up to T times the error of one: (V + 8) u on a row of
    h W + k v^T and of h, whose norms V m + |k| |v| and m V bound (m the largest entry of h, at least 1). The read-out
    adds the rows with weights |q|, and K + 1 further roundings.
    """
    i = doubled(i)
    T, K, V = i["q"].shape[1], i["k"].shape[3], i["v"].shape[3]
    m = largest((1.0, i["h0"].abs().max().item()))
    one_step = (V + 8) * (2 * m * V + i["k"].abs().max() * spec.largest_norm(i["v"]))
    return {"0": 2**-24 * (T * one_step + (K + 1) * m) * i["q"].abs().sum(-1, keepdim=True)}


def refusals(**i: Any) -> list[tuple[Named, str]]:
    return [
        ({"v": i["v"][0]}, "k must be"),
        ({n: i[n][:, :0] for n in PER_TOKEN}, "T must be"),
        ({"W": i["W"][:, :1]}, "W has shape"),
        ({"h0": i["h0"].mT}, "h0 has shape"),
        ({"f": i["f"].int()}, "f must be floating"),
        ({"q": i["q"].float()}, "share one dtype"),
        ({"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    ]


def workload(B: int) -> spec.Workload:
    T, H, K, V = spec.T, 8, 64, 16
    q, k, v = spec.draw(B, T, H, K), spec.draw(B, T, H, K), spec.draw(B, T, H, V)
    W, f = spec.draw(H, V, V) * V**-0.5, torch.rand(B, T, H, device="cuda")
    inputs = (q, k, v, W, f, spec.one_document(B))
    return spec.Workload(*spec.by_impl(m2rnn, peer=False), inputs, spec.streaming(inputs, (v,)))


def interpreter() -> list[spec.KernelOp]:
    from kernels.m2rnn import kernel

    def forward(q, k, v, W, f, doc_ids, h0) -> Outputs:
        """Return y, the final state and the states."""
        y, states = m2rnn_forward_with_states(q, k, v, W, f, doc_ids, h0)
        return y, states[:, -1], states

    def inputs(**sizes: Any) -> Named:
        return make_inputs(starts=(2, 3, 8), **sizes)

    return [
        spec.KernelOp(
            name="m2rnn",
            inputs=inputs,
            sizes="B T H K V",
            kernels=(kernel.m2rnn_fwd_kernel, kernel.m2rnn_bwd_kernel),
            eager=(forward, m2rnn_backward_eager),
            results="y final states",
            gradients="dy dfinal",
            dtypes=tuple(spec.INTERPRETED_DTYPES),
            cases=[*map(spec.KernelCase, SIZES)],
            faulty=[spec.KernelCase(SIZES[2], dtypes=("fp16",))],
            faults={"documents": spec.Fault({"doc_ids": torch.zeros_like})},
            layouts=[spec.KernelCase(SIZES[2], dtypes=("fp16",))],
        )
    ]


SIZES = [(1, 1, 1, 1, 1), (2, 7, 2, 6, 4), (1, 13, 2, 5, 3), (1, 9, 1, 4, 16), (2, 3, 1, 3, 20)]
SPEC = spec.ScanSpec(
    name="m2rnn",
    run=m2rnn,
    inputs=make_inputs,
    names="q k v W f doc_ids h0",
    step=step,
    per_token=PER_TOKEN,
    state=("h0",),
    chunked=False,
    fault=without_state,
    overflow=overflow,
    refusals=refusals,
    bad={"T": 6},
    batches=[{"B": B, "T": 6} for B in (2, 3, 5)],
    dynamic="q k v f doc_ids h0",
    smallest={"B": 2, "T": 5, "H": 2, "K": 3, "V": 2, "starts": (3,)},
    contract={"K 4": spec.Case({"B": 2, "T": 5, "H": 3, "K": 4, "V": 3, "starts": (4,)})},
    odd={},
    packed=spec.packed(st.integers(1, 30), st.just(1)),
    packed_tokens=20,
    same_bits_on=("cpu",),
    reordered=reordered,
    longest=40,
    rounding=1e-13,
    rounding_32=1e-4,
    free=("W", "f", "h0"),
    comparisons=spec.scan_comparison(
        make_inputs,
        m2rnn,
        PER_TOKEN,
        ("h0",),
        {},
        bound=rounding_bound,
        wrong={
            "a transposed W": spec.Fault({"W": lambda W: W.mT}),
            "the other gate": spec.Fault({"f": lambda f: 1 - f}),
            "documents ignored": spec.Fault({"doc_ids": spec.one_row}),
        },
        share=0.2,
    ),
    golden=spec.Golden(lambda: make_inputs(H=2), ("y", "final"), m2rnn),
    timed={"m2rnn-H8-K64-V16": spec.Timed(workload)},
    interpreter=interpreter,
)
