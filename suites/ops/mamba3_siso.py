"""mamba3_siso: the scan of Mamba-3 with one input and one output a head.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.mamba3_siso import Mamba3Inputs, Mamba3State, mamba3_siso, mamba3_siso_step
from kernels.mamba3_siso.eager import mamba3_siso_backward_eager, mamba3_siso_eager
from kernels.ssd_chunk_scan import SsdInputs, ssd_chunk_scan_eager
from suites.ops import spec
from suites.ops.spec import Named, Outputs
from suites.support.comparison import doubled
from suites.support.scans import documents

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
STATE = Mamba3State._fields
NAMES = (*Mamba3Inputs._fields, *STATE)
NARROW = ("q", "k", "v", "z")
FREE = ("adt", "dt", "trap", "q_bias", "k_bias", "angles", "D", *STATE)
run = spec.flat(mamba3_siso, Mamba3Inputs, Mamba3State)


def make_inputs(
    B=2,
    T=50,
    H=4,
    P=8,
    N=8,
    G=2,
    R=3,
    dtype=torch.float64,
    device="cpu",
    seed=0,
    starts=(13, 14, 40),
    ranks=(),
) -> Named:
    """Return random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row.

    ranks: the axis of ranks of mamba3_mimo, whose projections follow the biases.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    dt = F.softplus(draw(B, T, H))
    inputs = {
        "q": draw(B, T, *ranks, G, N),
        "k": draw(B, T, *ranks, G, N),
        "v": draw(B, T, H, P),
        "adt": -dt * (0.05 + uniform(B, T, H)),
        "dt": dt,
        "trap": draw(B, T, H),
        "q_bias": draw(H, *ranks, N),
        "k_bias": draw(H, *ranks, N),
        **{name: draw(H, *ranks, P) for name in (("mimo_v", "mimo_z", "mimo_out") if ranks else ())},
        "angles": draw(B, T, H, R),
        "D": draw(H),
        "z": draw(B, T, H, P),
        "doc_ids": documents(B, T, starts),
        "theta": 2 * math.pi * uniform(B, H, R),
        "h": draw(B, H, P, N),
        "k_prev": draw(B, H, *ranks, N),
        "v_prev": draw(B, H, P),
    }
    return spec.scan_dtypes(inputs, dtype, device, NARROW)


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
    given = SsdInputs(i["v"], -i["adt"], -torch.ones_like(i["D"]), k, q, i["D"], i["doc_ids"])
    y, _ = ssd_chunk_scan_eager(given)
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


def without_diagonal(comparison: spec.Comparison, inputs: Named, right: Outputs) -> Outputs:
    """A fault: the same weight for a token itself as for the tokens after it."""
    query, key = biased(inputs, "q"), biased(inputs, "k")
    _, shifted = trapezoid(inputs)
    itself = inputs["v"] * (shifted * (query * key).sum(-1))[..., None]
    return right[0] + itself * F.silu(inputs["z"]), *right[1:]


def noconv(comparison: spec.Comparison, inputs: Named, right: Outputs) -> Outputs:
    """A fault: add the error of the Mamba-2 scan with a scaled key.

    It is taken with zero angles and without a state, which that scan does not support.
    """
    still = inputs | {n: torch.zeros_like(inputs[n]) for n in ("angles", *STATE)}
    return right[0] + scaled_k_in_mamba2(still) - comparison.run(still)[0], *right[1:]


def overflow(inputs: Named) -> None:
    inputs["adt"][:, 5::7] = -3e4
    inputs["adt"][:, 8, 0] = -float("inf")


def peer_inputs(device: str) -> tuple[Tensor, ...]:
    """Return inputs without an initial state: the peer does not support one before packed documents."""
    inputs = make_inputs(T=130, P=64, N=64, R=16, dtype=torch.bfloat16, device=device)
    return tuple(inputs[n] for n in NAMES[:12])


def peer_output(*inputs: Tensor, impl: str) -> Tensor:
    return mamba3_siso(Mamba3Inputs(*inputs), impl=impl)[0]


def refusals(**i: Any) -> list[tuple[Named, str]]:
    return [
        ({"v": i["v"][0]}, "v must be"),
        ({"q": i["q"][..., [0, 1, 0], :]}, "H divisible by G"),
        ({"angles": i["angles"].repeat(1, 1, 1, 2)}, r"2\w <= N"),
        ({n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
        ({"k": i["k"][..., :-1]}, "k has shape"),
        ({"h": i["h"][:, :1]}, "state.h has shape"),
        ({"dt": i["dt"].int()}, "dt must be floating"),
        ({"z": i["z"].float()}, "share one dtype"),
        ({"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
        ({"chunk_size": 0}, "chunk_size must be"),
    ]


def workload(B: int, N: int, G: int) -> spec.Workload:
    T, H, P = spec.T, 112, 64
    v, z, dt = (
        spec.draw(B, T, H, P),
        spec.draw(B, T, H, P),
        F.softplus(spec.draw(B, T, H, dtype=torch.float32) - 3),
    )
    q_bias, k_bias, D = (torch.ones(*shape, device="cuda") for shape in ((H, N), (H, N), (H,)))
    inputs = (
        spec.draw(B, T, G, N), spec.draw(B, T, G, N), v, -2 * dt, dt, spec.draw(B, T, H), q_bias, k_bias,
        spec.draw(B, T, H, N // 4), D, z, spec.one_document(B),
    )  # fmt: skip

    def output_and_state(*inputs: Tensor, impl: str) -> tuple[Tensor, Tensor]:
        y, state = mamba3_siso(Mamba3Inputs(*inputs), impl=impl)
        return y, state.h

    work = spec.streaming(inputs, (v,), B * T * H * spec.scan_flops(P, N))
    return spec.Workload(*spec.by_impl(output_and_state), inputs, work)


def interpreter() -> list[spec.KernelOp]:
    import triton.language as tl

    from kernels.mamba3_siso import kernel, kernel_forward

    def inputs(chunk_size: int, dtype: torch.dtype, **sizes: Any) -> Named:
        made = make_inputs(dtype=dtype, **{"starts": (5, 6, 27)} | sizes)
        return made | {n: made[n].to(dtype) for n in ("angles", "D")} | {"chunk_size": chunk_size}

    def forward(**arguments: Any) -> Outputs:
        return kernel.mamba3_siso_fwd_kernel(*[*arguments.values()][:17])

    def backward(**arguments: Any) -> Outputs:
        return kernel.mamba3_siso_bwd_kernel(*arguments.values())

    def eager_forward(**arguments: Any) -> Outputs:
        given = {n: arguments[n] for n in (*NAMES, "chunk_size")}
        return spec.flat(mamba3_siso_eager, Mamba3Inputs, Mamba3State)(**given)

    def eager_backward(**arguments: Any) -> Outputs:
        *tensors, chunk_size, dy, dtheta, dh, dk, dv = arguments.values()
        state, dstate = Mamba3State(*tensors[12:]), Mamba3State(dtheta, dh, dk, dv)
        i = Mamba3Inputs(*tensors[:12])
        found = [*mamba3_siso_backward_eager(i, state, chunk_size, dy, dstate)]
        found[10] = found[10].to(dy.dtype)
        return found

    return [
        spec.KernelOp(
            name="mamba3_siso",
            inputs=inputs,
            sizes="B T H P N G R chunk_size",
            kernels=(forward, backward),
            eager=(eager_forward, eager_backward),
            gradients="dy dtheta dh dk dv",
            # Several programs along every axis, and loops with more than one iteration.
            blocks={
                (kernel, "PREPARED_HEADS"): 1,
                (kernel, "TURNED_TOKENS"): 8,
                (kernel, "TURNED_BLOCKS"): 2,
                (kernel, "SUMMED_TOKENS"): 16,
                (kernel_forward, "BEFORE"): tl.constexpr(2),
            },
            cases=[*map(spec.KernelCase, SIZES), spec.KernelCase(ONE_TOKEN, dtypes=("fp32",))],
            faulty=[spec.KernelCase(SIZES[2])],
            # v_prev and the gradient of D do not depend on the documents.
            faults={"documents": spec.Fault({"doc_ids": torch.zeros_like}, spares=(4, 14))},
            refused=[spec.KernelCase((1, 2, 1, 129, 8, 1, 2, 64), error="at most 128")],
            two_documents=[spec.KernelCase((1, 21, 2, 8, 8, 1, 3, 64), inputs={"starts": (11,)})],
            expanded=[spec.KernelCase((1, 18, 1, 16, 16, 1, 8, 64), dtypes=("fp32",))],
            per_token=PER_TOKEN[:-1],
            state=STATE,
            narrow_products=True,
            # A maximum error comes from one entry of few: one draw in five is beyond the factor.
            pooled=[{"seed": seed} for seed in range(3)],
            layouts=[spec.KernelCase(SIZES[2], dtypes=("fp16",))],
        )
    ]


SIZES = [
    (2, 37, 2, 8, 12, 1, 3, 16),
    (1, 66, 2, 5, 8, 2, 0, 64),
    (1, 18, 2, 16, 16, 1, 8, 64),
    (2, 19, 2, 8, 12, 1, 6, 16),  # all columns rotate, and fill no power of two
]
# Here the plain formula computes the gradient of adt without a product, so it has no comparable 16-bit error.
ONE_TOKEN = (2, 1, 8, 16, 16, 2, 8, 64)
SPEC = spec.ScanSpec(
    name="mamba3_siso",
    run=run,
    inputs=make_inputs,
    names=" ".join(NAMES),
    step=spec.stepped(mamba3_siso_step, Mamba3Inputs, Mamba3State),
    per_token=PER_TOKEN,
    state=STATE,
    turns=("theta",),
    # The given state without its v_prev k_prev^T.
    fault=lambda **inputs: run(**inputs | {"v_prev": inputs["v_prev"] * 0}),
    overflow=overflow,
    refusals=refusals,
    bad={"T": 6},
    loses_digits=True,
    batches=[{"B": B, "T": 20} for B in (2, 3, 5)],
    dynamic=" ".join((*PER_TOKEN, *STATE)),
    smallest={"B": 2, "T": 5, "H": 2, "P": 2, "N": 3, "G": 1, "R": 1, "starts": (3,)},
    contract={"N 5": spec.Case({"B": 2, "T": 9, "H": 4, "P": 3, "N": 5, "G": 2, "R": 2, "starts": (4,)})},
    odd={"P": 3, "N": 6},
    drawn={"G": st.sampled_from([1, 2, 4]), "R": st.integers(0, 2), "N": st.just(5)},
    packed=spec.packed(st.integers(1, 40), st.sampled_from([4, 16, 64])),
    reordered=lambda inputs, y: 2 * rounding_bound(inputs) if y.dtype == torch.float32 else None,
    free=FREE,
    comparisons=spec.scan_comparison(
        make_inputs,
        partial(run, chunk_size=16),
        PER_TOKEN,
        STATE,
        {"no diagonal term": without_diagonal, "noconv": noconv},
        operands=partial(run, chunk_size=16, impl="eager"),
        other=partial(run, chunk_size=64, impl="eager"),
        angles=(1,),
        bound=lambda i, exact: {"0": rounding_bound(i)},
        forms=[partial(run, chunk_size=chunk_size) for chunk_size in (1, 64)],
        wrong={
            "documents ignored": spec.Fault({"doc_ids": spec.one_row}),
            "no angle carried": spec.Fault({"theta": torch.zeros_like}),
        },
        share=0.1,
    ),
    golden=spec.Golden(
        lambda: make_inputs(T=20, H=2, P=4, N=6, G=1, R=2, starts=(5, 6, 13)),
        ("y", *STATE),
        partial(run, chunk_size=8),
    ),
    timed={
        "mamba3_siso-N64-G8": spec.Timed(partial(workload, N=64, G=8)),
        "mamba3_siso-N128-G1": spec.Timed(partial(workload, N=128, G=1)),
    },
    peer="mamba-ssm",
    packages=("mamba_ssm",),
    peers={"mamba3_siso": spec.Peer(peer_output, peer_inputs)},
    tuned_peer=True,
    marks={
        "mamba3_siso-N64-G8/forward_milliseconds": (1.42, ""),
        "mamba3_siso-N64-G8/both_milliseconds": (3.75, ""),
        "mamba3_siso-N128-G1/both_milliseconds": (6.0, ""),
    },
    interpreter=interpreter,
)
