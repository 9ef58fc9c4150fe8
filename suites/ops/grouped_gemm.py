"""grouped_gemm: one matrix product per expert, over the rows of its tokens.

M rows, E experts, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm.eager import grouped_gemm_backward_eager, grouped_gemm_eager
from kernels.grouped_gemm.naive import grouped_gemm_naive
from suites.ops import spec
from suites.ops.spec import Named, Outputs
from suites.support.comparison import random_weights, trained

COUNTS = (5, 0, 17, 8)
NAMES = "x weight counts"


def make_inputs(
    counts: Sequence[int] = COUNTS, D_in=8, D_out=16, spare=3, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x with `spare` unassigned rows at the end, weight, and the counts as int64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts) + spare, D_in, generator=g, dtype=torch.float64)
    weight = torch.randn(len(counts), D_in, D_out, generator=g, dtype=torch.float64)
    return x.to(device, dtype), weight.to(device, dtype), torch.tensor(counts, device=device)


def refusals(x: Tensor, weight: Tensor, counts: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"x": x[None]}, "3-d"),
        ({"weight": weight[0]}, "2-d"),
        ({"weight": weight[:, :7]}, "x has shape"),
        ({"counts": counts[1:]}, "counts has shape"),
        ({"weight": weight[..., :0]}, "no side may be empty"),
        ({"x": x.float()}, "one float dtype"),
        ({"x": x.int(), "weight": weight.int()}, "one float dtype"),
        ({"counts": counts.short()}, "int32 or int64"),
        ({"bucket": 8}, "bucket is for impl 'padded'"),
        ({"impl": "padded", "bucket": 0}, "at least 1"),
    ]


def workload(B: int, D_in: int, D_out: int) -> spec.Workload:
    E, K = 64, 6
    counts = spec.routing(B, E, K).flatten().bincount(minlength=E)
    x, weight = spec.draw(B * spec.T * K, D_in), spec.draw(E, D_in, D_out) * D_in**-0.5
    read, y = spec.size(x, weight), len(x) * D_out * 2
    flops = 2 * len(x) * D_in * D_out

    def grouped(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return grouped_gemm(x, weight, counts, impl=impl)

    return spec.Workload(
        *spec.by_impl(grouped), (x, weight), spec.Work(read + y, 3 * read + 2 * y, flops, 3 * flops)
    )


def interpreter() -> list[spec.KernelOp]:
    from kernels.grouped_gemm import kernel

    def inputs(counts: Sequence[int], D_in: int, D_out: int, spare: int = 8, **sizes: Any) -> Named:
        """The unassigned rows at the end hold nan, also in dy."""
        made = spec.by_name(NAMES, make_inputs(counts, D_in, D_out, spare, seed=D_in, **sizes))
        x = made["x"]
        dy = torch.randn(len(x), D_out, generator=torch.Generator().manual_seed(1)).to(x)
        x[sum(counts) :] = dy[sum(counts) :] = torch.nan
        return made | {"dy": dy}

    def unassigned(arguments: Named, y: Tensor, dx: Tensor, dweight: Tensor) -> Outputs:
        """Return the results of rows without an expert, and of experts without a row."""
        counts = arguments["counts"]
        return y[counts.sum() :], dx[counts.sum() :], dweight[counts == 0]

    tiles = {"WIDE": (16, 64, 32), "TALL": (32, 32, 32), "PLAIN": (16, 32, 32)}
    return [
        spec.KernelOp(
            name="grouped_gemm",
            inputs=inputs,
            sizes="counts D_in D_out",
            kernels=(kernel.grouped_gemm_fwd_kernel, kernel.grouped_gemm_bwd_kernel),
            eager=(grouped_gemm_eager, grouped_gemm_backward_eager),
            blocks={
                (kernel, "PROGRAMS"): 3,
                (kernel, "PLAN_TILES"): 8,
                (kernel, "GROUP"): 2,
                **{
                    (kernel, name): getattr(kernel, name) | dict(zip(("BM", "BN", "BK"), tile))
                    for name, tile in tiles.items()
                },
            },
            cases=[spec.KernelCase((counts, *dims)) for dims in KERNEL_DIMS for counts in ROUTINGS],
            faulty=[
                spec.KernelCase((RAGGED, *dims), inputs={"spare": 0}, dtypes=(dtype,))
                for dtype, dims in [
                    ("fp32", KERNEL_DIMS[2]),
                    ("fp16", KERNEL_DIMS[0]),
                    ("fp16", KERNEL_DIMS[1]),
                ]
            ],
            faults={
                "a row too many": spec.Fault({"counts": lambda counts: counts + torch.tensor([1, 0, -1, 0])}),
                "next expert's matrix": spec.Fault({"weight": lambda weight: weight.roll(1, 0)}, spares=(2,)),
                "3 % of x": spec.Fault({"x": lambda x: x * 1.03}, spares=(1,)),
                "last row of dy": spec.Fault(
                    {"dy": lambda dy: dy.index_fill(0, torch.tensor([53]), 0)}, spares=(0,)
                ),
            },
            layouts=[
                spec.KernelCase((RAGGED, *dims), inputs={"spare": 0}, dtypes=("fp16",))
                for dims in KERNEL_DIMS[1:3]
            ],
            zeros=unassigned,
        )
    ]


one_more = torch.tensor([0, 1, -1, 0, 0])
# Chunks of 32, in wide tiles one way and in tall tiles the other; then two that no descriptor fits.
KERNEL_DIMS = [(32, 128), (64, 32), (20, 35), (1, 3)]
RAGGED = (5, 0, 40, 9)
ROUTINGS = [RAGGED, (16, 32, 0), (0, 0, 35, 0), (0, 0, 0, 0)]  # the second one is whole tiles
# The Triton kernels load full chunks of 64 by TMA, and other sizes by plain loads.
DIMS = {"tall tiles": (64, 128), "wide tiles": (192, 256), "odd": (20, 25)}


def rounding_bound(i: Named, exact: Named) -> Named:
    """A sum of n products in fp32 is off by at most n u times the same sum of absolute values."""
    sizes = {n: i[n].double().abs() for n in ("x", "weight")} | {"counts": i["counts"]}
    weights = [t.double().abs() for t in random_weights([exact["0"]])]
    (total,), grads = trained(grouped_gemm_naive, sizes, weights)
    terms = {"0": i["x"].shape[1], "x": i["weight"].shape[2], "weight": int(i["counts"].max())}
    return {n: count * 2**-24 * ({"0": total} | grads)[n] for n, count in terms.items()}


SPEC = spec.OpSpec(
    name="grouped_gemm",
    run=grouped_gemm,
    inputs=make_inputs,
    names=NAMES,
    cases={name: spec.Case({"D_in": D_in, "D_out": D_out}) for name, (D_in, D_out) in DIMS.items()},
    forms=("op", "eager", "padded"),
    gradcheck={"an empty expert": spec.Case({"counts": (2, 0, 3), "D_in": 3, "D_out": 2, "spare": 1})},
    batches=[{"spare": spare} for spare in (2, 3, 5)],
    dynamic="x",
    refusals=refusals,
    loses_digits=True,
    contract={
        name: spec.Case({"counts": (3, 0, 5), "D_in": DIMS[name][0], "D_out": DIMS[name][1]})
        for name in ("odd", "tall tiles")
    },
    comparisons={
        # Counts that fill no tile, one and more than two of the kernel's, and experts without rows at both ends.
        "": spec.Comparison(
            op=grouped_gemm,
            inputs=spec.naming(NAMES, make_inputs, counts=(0, 600, 3, 256, 0)),
            cases={name: spec.Case({"D_in": D_in, "D_out": D_out}) for name, (D_in, D_out) in DIMS.items()},
            faults={"rows of another expert": spec.changed(counts=lambda counts: counts.roll(1))},
            bound=rounding_bound,
            wrong={
                "next expert's matrix": spec.Fault({"weight": lambda weight: weight.roll(1, 0)}, spares=(2,)),
                "a row too many": spec.Fault({"counts": lambda counts: counts + one_more.to(counts)}),
                "3 % of x": spec.Fault({"x": lambda x: x * 1.03}, spares=(1,)),
                "3 % of the matrix": spec.Fault({"weight": lambda weight: weight * 1.03}, spares=(2,)),
            },
        )
    },
    golden=spec.Golden(lambda: spec.by_name(NAMES, make_inputs()), ("y",), grouped_gemm),
    timed={
        "grouped_gemm-E64-K6-3584x896": spec.Timed(partial(workload, D_in=3584, D_out=896)),
        "grouped_gemm-E64-K6-896x3584": spec.Timed(partial(workload, D_in=896, D_out=3584)),
    },
    peer="F.grouped_mm",
    marks={
        # 631 GFLOP at 600 TFLOP/s
        "grouped_gemm-E64-K6-3584x896/forward_milliseconds": (1.052, ""),
        "grouped_gemm-E64-K6-896x3584/forward_milliseconds": (1.052, ""),
        "grouped_gemm-E64-K6-3584x896/forward_over_peer": (1.0, ""),
        "grouped_gemm-E64-K6-3584x896/both_over_peer": (1.0, ""),
        "grouped_gemm-E64-K6-896x3584/forward_over_peer": (1.0, ""),
        "grouped_gemm-E64-K6-896x3584/both_over_peer": (1.0, ""),
    },
    interpreter=interpreter,
)
