"""rms_norm_gated: an RMS norm of groups of channels, gated before or after it.

B batch, T tokens, D channels, S group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.rms_norm_gated import rms_norm_gated
from kernels.rms_norm_gated.eager import rms_norm_gated_backward_eager, rms_norm_gated_eager
from suites.ops import spec
from suites.ops.spec import Named

NAMES = "x gate weight"


def make_inputs(shape=(2, 9), D=64, dtype=torch.float64, device="cpu", seed=0) -> tuple[Tensor, ...]:
    """Return random x and gate (..., D) and a weight near 1."""
    g = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(*shape, D, generator=g, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)
    return tuple(t.to(device, dtype) for t in (x, gate, weight))


def peer_inputs(device: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = ((6, 256), (6, 256), (256,))
    return tuple(torch.randn(*shape, generator=g).to(device, torch.bfloat16) for shape in shapes)


def refusals(x: Tensor, gate: Tensor, weight: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"gate": gate[:1]}, "gate has shape"),
        ({"weight": weight[1:]}, "weight has shape"),
        ({"x": x[0, 0, 0]}, "0-d"),
        ({"x": x.int()}, "x must be floating point"),
        ({"gate": gate.int()}, "gate must be floating point"),
        ({"group_size": 7}, "do not split"),
        ({"group_size": 0}, "do not split"),
        ({"eps": -1.0}, "eps"),
    ]


def workload(B: int, norm_before_gate: bool) -> spec.Workload:
    D, S = 7168, 896
    inputs = (spec.draw(B, spec.T, D), spec.draw(B, spec.T, D), spec.draw(D))
    functions = spec.by_impl(rms_norm_gated, group_size=S, norm_before_gate=norm_before_gate)
    return spec.Workload(*functions, inputs, spec.streaming(inputs, inputs[:1]))


def interpreter() -> list[spec.KernelOp]:
    from kernels.rms_norm_gated import kernel

    def inputs(N: int, rows: tuple[int, ...] = (), **sizes: Any) -> Named:
        return spec.by_name(NAMES, make_inputs(rows or (N,), **sizes))

    def cases(sizes: Sequence[tuple[int, int, int]], dtypes: Sequence[str] = ()) -> list[spec.KernelCase]:
        """Return cases of these N, D, S, gated after and before the norm."""
        return [
            spec.KernelCase((N, D), options(S, first), dtypes=dtypes)
            for N, D, S in sizes
            for first in (False, True)
        ]

    return [
        spec.KernelOp(
            name="rms_norm_gated",
            inputs=inputs,
            sizes="N D",
            kernels=(kernel.rms_norm_gated_fwd_kernel, kernel.rms_norm_gated_bwd_kernel),
            eager=(rms_norm_gated_eager, rms_norm_gated_backward_eager),
            options={"eps": 1e-5},
            # Several rows per tile if groups are small, several tiles per program, the last one not full.
            blocks={(kernel, "TILE"): 32, (kernel, "FORWARD_WARPS"): 3, (kernel, "BACKWARD_WARPS"): 2},
            dtypes=tuple(spec.INTERPRETED_DTYPES),
            cases=[*cases(SIZES), spec.KernelCase((12, 8), options(8, False), {"rows": (3, 4)})],
            faulty=cases(SIZES[1:2], ("fp16",)),
            faults={
                "group size": spec.Fault({"group_size": 20}),
                "order": spec.Fault({"norm_before_gate": lambda first: not first}),
                "eps": spec.Fault({"eps": 0.1}),
            },
            layouts=cases(SIZES[1:2], ("fp16",))[:1],
        )
    ]


def options(S: int | None, before: bool) -> dict[str, Any]:
    return {"group_size": S, "norm_before_gate": before}


def rounding_bound(i: Named, exact: Named) -> Named:
    """y is a product of single factors: relative to |y| a mean of S squares adds at most S/2 + 1 roundings (halved by
    the root), silu, root and products no more than 16.
    """
    return {"0": 2**-24 * ((i["group_size"] or 64) / 2 + 17) * exact["0"].abs()}


SIZES = [(1, 8, 8), (7, 40, 40), (33, 40, 8), (5, 20, 10), (9, 2, 1)]  # N D S
CASES = {
    f"{'norm first' if before else 'gate first'}, groups of {S}": options(S, before)
    for S in (None, 4, 16)
    for before in (True, False)
}
SPEC = spec.OpSpec(
    name="rms_norm_gated",
    run=rms_norm_gated,
    inputs=make_inputs,
    names=NAMES,
    cases={name: spec.Case(options=chosen) for name, chosen in CASES.items()},
    gradcheck={
        f"{before}, groups of {S}": spec.Case({"shape": (2, 3), "D": 4}, options(S, before))
        for S in (None, 2)
        for before in (False, True)
    },
    batches=[{"shape": (B, 7)} for B in (2, 3, 5)],
    dynamic="x gate",
    compiled={"group_size": 16},
    refusals=refusals,
    bad={"dtype": torch.float32},
    free=("gate", "weight"),
    elementwise=True,
    contract={
        f"shape {shape}": spec.Case({"shape": shape, "D": 6}, options(3, False))
        for shape in ((), (3,), (2, 3))
    },
    comparisons={
        "": spec.Comparison(
            op=rms_norm_gated,
            inputs=spec.naming(NAMES, make_inputs),
            cases={name: spec.Case(options=chosen) for name, chosen in CASES.items()},
            rows={"forward_error_ratio": 2.0, "gradient_error_ratio": 2.0},
            bound=rounding_bound,
            wrong={
                "norm and gate swapped": spec.Fault({"norm_before_gate": lambda before: not before}),
                "other groups": spec.Fault({"group_size": 8}),
                "gate negated": spec.Fault({"gate": torch.neg}),
                "no weight": spec.Fault({"weight": torch.ones_like}),
                "eps a hundred times larger": spec.Fault({"eps": 1e-3}),
            },
            share=0.5,
        )
    },
    golden=spec.Golden(
        lambda: spec.by_name(NAMES, make_inputs(D=16)), ("y",), partial(rms_norm_gated, group_size=8)
    ),
    timed={
        "rms_norm_gated-D7168-gate_first": spec.Timed(partial(workload, norm_before_gate=False)),
        "rms_norm_gated-D7168-norm_first": spec.Timed(partial(workload, norm_before_gate=True)),
    },
    peer="mamba-ssm",
    packages=("mamba_ssm",),
    peers={"rms_norm_gated": spec.Peer(partial(rms_norm_gated, group_size=64), peer_inputs)},
    marks={
        f"rms_norm_gated-D7168-{order}_first/{way}_roofline_fraction": (0.8, "")
        for order in ("gate", "norm")
        for way in ("forward", "both")
    },
    interpreter=interpreter,
)
