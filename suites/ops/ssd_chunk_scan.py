"""ssd_chunk_scan: the scan of Mamba-2 in chunks.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.ssd_chunk_scan import SsdInputs, ssd_chunk_scan, ssd_chunk_scan_eager, ssd_chunk_scan_step
from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_backward_eager
from suites.ops import spec
from suites.ops.spec import Named, Outputs
from suites.support.comparison import doubled
from suites.support.scans import cut, documents

PER_TOKEN = ("x", "dt", "Bmat", "Cmat", "doc_ids")
run = spec.flat(ssd_chunk_scan, SsdInputs)


def make_inputs(
    B=2, T=50, H=4, P=8, N=8, G=2, dtype=torch.float64, device="cpu", seed=0, starts=(13, 14, 40)
) -> Named:
    """Return random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "x": draw(B, T, H, P),
        "dt": F.softplus(draw(B, T, H)),
        "A": -torch.rand(H, generator=g, dtype=torch.float64) - 0.05,
        "Bmat": draw(B, T, G, N),
        "Cmat": draw(B, T, G, N),
        "D": draw(H),
        "doc_ids": documents(B, T, starts),
        "initial_state": draw(B, H, P, N),
    }
    return spec.scan_dtypes(inputs, dtype, device, ("x", "Bmat", "Cmat"))


def rounding_bound(inputs: Named) -> Tensor:
    """Bound the rounding error of y (B,T,H,P) in fp32.

    y is a sum of products. Each goes through at most T + N additions, and T more in its exponent s, where an error of T
    u |s| on a weight exp(s) is at most T u of the undecayed one. So (2 T + N + 16) u times the same scan over absolute
    values, with no decay and no reset, bounds it; 16 for the roundings of single factors.
    """
    sizes = {n: t.abs() if t.is_floating_point() else t * 0 for n, t in doubled(inputs).items()}
    T, N = inputs["x"].shape[1], inputs["Bmat"].shape[3]
    return (2 * T + N + 16) * 2**-24 * run(**sizes | {"A": sizes["A"] * 0}, impl="naive")[0]


def in_chunks(**inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A fault: each chunk of 16 from a zero state, so the quadratic part without the state between chunks."""
    zero = torch.zeros_like(inputs["initial_state"])
    starts = range(0, inputs["x"].shape[1], 16)
    chunks = [cut(inputs, slice(t, t + 16), PER_TOKEN) | {"initial_state": zero} for t in starts]
    parts = [run(**chunk, impl="eager") for chunk in chunks]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


def without_carry(comparison: spec.Comparison, inputs: Named, right: Outputs) -> Outputs:
    return in_chunks(**inputs)


def overflow(inputs: Named) -> None:
    inputs["dt"][:, 5::7] = 3e3
    inputs["A"][0] = -80.0


def peer_inputs(device: str) -> tuple[Tensor, ...]:
    return tuple(make_inputs(T=130, P=64, N=64, dtype=torch.bfloat16, device=device).values())


def peer_output(*inputs: Tensor, impl: str) -> Tensor:
    return at_once(*inputs, impl=impl)[0]


def at_once(*inputs: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return ssd_chunk_scan(SsdInputs(*inputs[:7]), *inputs[7:], impl=impl)


def refusals(**i: Any) -> list[tuple[Named, str]]:
    return [
        ({"x": i["x"][0]}, "x must be"),
        ({"Bmat": i["Bmat"][:, :, [0, 1, 0]]}, "H divisible by G"),
        ({n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
        ({"A": i["A"][:-1]}, "A has shape"),
        ({"initial_state": i["initial_state"].mT[..., :1]}, "initial_state has shape"),
        ({"dt": i["dt"].int()}, "dt must be floating"),
        ({"Cmat": i["Cmat"].float()}, "share one dtype"),
        ({"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
        ({"chunk_size": 0}, "chunk_size must be"),
    ]


def workload(B: int, N: int, G: int) -> spec.Workload:
    T, H, P = spec.T, 112, 64
    x, dt = spec.draw(B, T, H, P), F.softplus(spec.draw(B, T, H, dtype=torch.float32) - 3)
    A, D = -torch.rand(H, device="cuda") * 15 - 1, torch.ones(H, device="cuda")
    inputs = (x, dt, A, spec.draw(B, T, G, N), spec.draw(B, T, G, N), D, spec.one_document(B))
    work = spec.streaming(inputs, (x,), B * T * H * spec.scan_flops(P, N))
    return spec.Workload(*spec.by_impl(at_once), inputs, work)


def interpreter() -> list[spec.KernelOp]:
    from kernels.ssd_chunk_scan import kernel

    def inputs(chunk_size: int, dtype: torch.dtype, **sizes: Any) -> Named:
        made = make_inputs(dtype=dtype, **{"starts": (5, 6, 27)} | sizes)
        return made | {"D": made["D"].to(dtype), "chunk_size": chunk_size}

    def backward(chunk_size: int, dy: Tensor, dfinal: Tensor, **given: Any) -> Outputs:
        *tensors, state = given.values()
        return ssd_chunk_scan_backward_eager(SsdInputs(*tensors), state, chunk_size, dy, dfinal)

    def forward(**given: Any) -> Outputs:
        names = (*SsdInputs._fields, "initial_state", "chunk_size")
        return spec.flat(ssd_chunk_scan_eager, SsdInputs)(**{n: given[n] for n in names})

    return [
        spec.KernelOp(
            name="ssd_chunk_scan",
            inputs=inputs,
            sizes="B T H P N G chunk_size",
            kernels=(kernel.ssd_chunk_scan_fwd_kernel, kernel.ssd_chunk_scan_bwd_kernel),
            eager=(forward, backward),
            gradients="dy dfinal",
            # Several programs along every axis: the heads of a group in parts, a last block of heads that is not full.
            blocks={(kernel, "PREPARED_HEADS"): 4, (kernel, "ENOUGH_PROGRAMS"): 8},
            cases=[*map(spec.KernelCase, SIZES)],
            faulty=[spec.KernelCase(SIZES[2])],
            # The gradient of D does not depend on the documents.
            faults={"documents": spec.Fault({"doc_ids": torch.zeros_like}, spares=(7,))},
            refused=[spec.KernelCase((1, 2, 1, 129, 8, 1, 64), error="at most 128")],
            two_documents=[spec.KernelCase((1, 21, 2, 8, 8, 1, 64), inputs={"starts": (11,)})],
            per_token=PER_TOKEN[:-1],
            state=("initial_state",),
            narrow_products=True,
            # The gradient of A has only H values, and the maximum of few errors varies.
            pooled=[{"seed": seed} for seed in range(3)],
            layouts=[spec.KernelCase(SIZES[2], dtypes=("fp16",))],
        )
    ]


SIZES = [(2, 37, 6, 8, 12, 2, 16), (1, 66, 6, 5, 8, 2, 64), (1, 18, 2, 16, 16, 1, 64)]
SPEC = spec.ScanSpec(
    name="ssd_chunk_scan",
    run=run,
    inputs=make_inputs,
    names=" ".join((*SsdInputs._fields, "initial_state")),
    step=spec.stepped(ssd_chunk_scan_step, SsdInputs),
    per_token=PER_TOKEN,
    state=("initial_state",),
    fault=in_chunks,
    overflow=overflow,
    refusals=refusals,
    bad={"T": 6},
    loses_digits=True,
    batches=[{"B": B, "T": 20} for B in (2, 3, 5)],
    dynamic="x dt Bmat Cmat doc_ids initial_state",
    smallest={"B": 2, "T": 5, "H": 2, "P": 2, "N": 2, "G": 1, "starts": (3,)},
    contract={"N 5": spec.Case({"B": 2, "T": 9, "H": 4, "P": 3, "N": 5, "G": 2, "starts": (4,)})},
    odd={"P": 3, "N": 5},
    drawn={"G": st.sampled_from([1, 2, 4])},
    packed=spec.packed(st.integers(1, 40), st.sampled_from([4, 16, 64])),
    reordered=lambda inputs, y: 2 * rounding_bound(inputs) if y.dtype == torch.float32 else None,
    rounding=1e-13,
    rounding_32=1e-5,
    free=("dt", "A", "D", "initial_state"),
    comparisons=spec.scan_comparison(
        make_inputs,
        partial(run, chunk_size=16),
        PER_TOKEN,
        ("initial_state",),
        {"no state between chunks": without_carry},
        operands=partial(run, chunk_size=16, impl="eager"),
        bound=lambda i, exact: {"0": rounding_bound(i)},
        forms=[partial(run, chunk_size=chunk_size) for chunk_size in (1, 64)],
        wrong={"documents ignored": spec.Fault({"doc_ids": spec.one_row})},
        share=0.2,
    ),
    golden=spec.Golden(
        lambda: make_inputs(T=20, H=2, P=4, N=6, G=1, starts=(5, 6, 13)),
        ("y", "final"),
        partial(run, chunk_size=8),
    ),
    timed={
        "ssd_chunk_scan-N64-G8": spec.Timed(partial(workload, N=64, G=8)),
        "ssd_chunk_scan-N128-G1": spec.Timed(partial(workload, N=128, G=1)),
    },
    peer="mamba-ssm",
    packages=("mamba_ssm",),
    peers={"ssd_chunk_scan": spec.Peer(peer_output, peer_inputs)},
    tuned_peer=True,
    marks={
        "ssd_chunk_scan-N64-G8/forward_milliseconds": (0.83, ""),
        "ssd_chunk_scan-N64-G8/both_milliseconds": (4.1, ""),
    },
    interpreter=interpreter,
)
