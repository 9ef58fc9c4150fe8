"""moe_combine: the weighted sum of the expert outputs of each token.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.moe_combine import moe_combine, moe_combine_backward_eager, moe_combine_eager
from kernels.moe_dispatch import moe_dispatch
from suites.ops import spec
from suites.ops.spec import Named

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]
NAMES = "y expert slot weights bucket"


def make_inputs(
    B=2, T=24, K=3, D=8, E=6, C=8, dtype=torch.float64, device="cpu", seed=0, weights_dtype=None
) -> Inputs:
    """Return y (E,B*C,D) with noise in unused rows too, expert, slot, weights and bucket; a small C drops some."""
    g = torch.Generator().manual_seed(seed)
    scores, expert = torch.rand(B, T, E, generator=g).sub(0.1 * torch.arange(E)).topk(K, -1)
    weights = torch.softmax(scores.double(), -1).to(
        weights_dtype or torch.promote_types(dtype, torch.float32)
    )
    y = torch.randn(E, B * C, D, generator=g, dtype=torch.float64).to(dtype)
    _, slot, _ = moe_dispatch(torch.zeros(B, T, 1), expert, E, C)
    return *(t.to(device) for t in (y, expert, slot, weights)), C


def refusals(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int
) -> list[tuple[Named, str]]:
    return [
        ({"weights": weights.bfloat16()}, "combine weights stay fp32"),
        ({"weights": weights.half()}, "combine weights stay fp32"),
        ({"y": y[0]}, "2-d"),
        ({"bucket": bucket - 1}, "rows per expert"),
        ({"slot": slot[1:]}, "slot has shape"),
        ({"weights": weights[..., 1:]}, "weights has shape"),
        ({"slot": slot.int()}, "int64"),
        ({"y": y.int(), "out_dtype": torch.float32}, "y must be floating point"),
        ({"out_dtype": torch.int32}, "out must be floating point"),
    ]


def workload(B: int) -> spec.Workload:
    E, K, D, bucket = 64, 6, 3584, 512
    expert = spec.routing(B, E, K)
    _, slot, _ = moe_dispatch(spec.draw(B, spec.T, 8), expert, E, bucket)
    y, weights = spec.draw(E, B * bucket, D), torch.rand(B, spec.T, K, device="cuda")
    rows, out = B * spec.T * K * D * 2, B * spec.T * D * 2
    forward = rows + out + spec.size(expert, slot, weights)
    backward = out + rows + spec.size(y) + spec.size(expert, slot, weights, weights)

    def combine(y: Tensor, weights: Tensor, impl: str) -> Tensor:
        return moe_combine(y, expert, slot, weights, bucket, impl=impl)

    return spec.Workload(
        *spec.by_impl(combine, peer=False), (y, weights), spec.Work(forward, forward + backward)
    )


def interpreter() -> list[spec.KernelOp]:
    from kernels.moe_combine import kernel

    def forward(y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int) -> Tensor:
        return kernel.moe_combine_fwd_kernel(y, expert, slot, weights, bucket, y.dtype)

    def inputs(**sizes: Any) -> Named:
        return spec.by_name(NAMES, make_inputs(**sizes, weights_dtype=torch.float32))

    return [
        spec.KernelOp(
            name="moe_combine",
            inputs=inputs,
            sizes="B T K E D C",
            kernels=(forward, kernel.moe_combine_bwd_kernel),
            eager=(moe_combine_eager, moe_combine_backward_eager),
            gradients="dout",
            blocks={(kernel, name): 16 for name in ("FORWARD_BLOCK", "BACKWARD_BLOCK", "OWNERS_BLOCK")},
            dtypes=tuple(spec.INTERPRETED_DTYPES),
            cases=[*map(spec.KernelCase, SIZES)],
            # The sizes with dropped assignments.
            faulty=[spec.KernelCase(SIZES[1]), spec.KernelCase(SIZES[3])],
            faults={"dropped ones": spec.Fault({"slot": lambda slot: slot.clamp(min=0)})},
            layouts=[spec.KernelCase(SIZES[1])],
        )
    ]


SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]
SMALL = {"T": 4, "K": 2, "D": 2, "E": 3}
SPEC = spec.OpSpec(
    name="moe_combine",
    run=moe_combine,
    inputs=make_inputs,
    names=NAMES,
    cases={"dropped": spec.Case({"C": 3}), "none dropped": spec.Case({"C": 24})},
    rounding=1e-13,
    sizes={
        "B": st.integers(1, 3),
        "T": st.integers(1, 17),
        "K": st.integers(1, 6),
        "C": st.sampled_from([1, 2, 5, 17]),
    },
    gradcheck={f"bucket {C}": spec.Case({**SMALL, "C": C}) for C in (1, 4)},
    refusals=refusals,
    bad={"dtype": torch.bfloat16},
    stays_fp32=("weights",),
    elementwise=True,
    contract={
        str(dtype): spec.Case({"T": 6, "C": 2}, {"out_dtype": dtype})
        for dtype in (torch.float32, torch.bfloat16)
    },
    comparisons={
        "": spec.Comparison(
            op=moe_combine,
            inputs=spec.naming(NAMES, make_inputs, T=64, K=5, D=32, C=64),
            rows={"error_ratio": 2.0},
            faults={"bf16 weights": spec.changed(weights=lambda weights: weights.bfloat16().float())},
        )
    },
    golden=spec.Golden(
        lambda: dict(zip(NAMES.split()[:4], make_inputs())), ("out",), partial(moe_combine, bucket=8)
    ),
    timed={"moe_combine-E64-K6": spec.Timed(workload)},
    marks={
        "moe_combine-E64-K6/forward_roofline_fraction": (0.8, ""),
        "moe_combine-E64-K6/both_roofline_fraction": (0.8, ""),
    },
    interpreter=interpreter,
)
