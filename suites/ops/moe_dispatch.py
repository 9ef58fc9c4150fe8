"""moe_dispatch: the copy of each token into a slot of each of its experts.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.moe_dispatch import moe_dispatch, moe_dispatch_backward_eager
from suites.ops import spec
from suites.ops.spec import Named

E = 5
EXPERTS = {"num_experts": E, "bucket": 4}
NAMES = "x expert"


def make_inputs(
    B=2, T=17, K=3, D=4, E=E, dtype=torch.float32, device="cpu", seed=0, routing="distinct"
) -> tuple[Tensor, Tensor]:
    """Return random x (B,T,D), and K experts per token, skewed to low ids so that buckets fill unevenly.

    routing: "distinct", "repeated" (the same expert K times), "some null" or "all null" (no expert).
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=g, dtype=torch.float64).to(device, dtype)
    scores = torch.rand(B, T, E, generator=g) - 0.1 * torch.arange(E)
    expert = scores.topk(K, -1).indices.to(device)
    null = torch.full_like(expert, -1)
    routings = {
        "distinct": expert,
        "repeated": expert[..., :1].expand(B, T, K),
        "some null": expert.where(expert != 1, null),
        "all null": null,
    }
    return x, routings[routing]


def refusals(x: Tensor, expert: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"x": x[0]}, "2-d"),
        ({"expert": expert[:, :3]}, "expert has shape"),
        ({"x": x.int()}, "floating point"),
        ({"expert": expert.int()}, "int64"),
        ({"num_experts": 0}, "num_experts"),
        ({"bucket": 0}, "bucket"),
    ]


def workload(B: int) -> spec.Workload:
    experts, K, D, bucket = 64, 6, 3584, 512
    x, expert = spec.draw(B, spec.T, D), spec.routing(B, experts, K)
    forward = spec.size(x, expert, expert) + experts * B * bucket * D * 2
    # Backward: a row of the padded gradient for each assignment, and x's gradient.
    backward = B * spec.T * K * D * 2 + spec.size(x, expert, expert)

    def padded(x: Tensor, impl: str) -> Tensor:
        return moe_dispatch(x, expert, experts, bucket, impl=impl)[0]

    return spec.Workload(*spec.by_impl(padded, peer=False), (x,), spec.Work(forward, forward + backward))


def interpreter() -> list[spec.KernelOp]:
    """The gradient alone: the forward is compared bit by bit (interpret/test_moe_dispatch.py)."""
    from kernels.moe_dispatch import kernel

    def inputs(**sizes: Any) -> Named:
        x, expert, C = null_routing(**sizes)
        dpadded, slot, _ = moe_dispatch(x, expert, sizes["E"], C, impl="eager")
        noise = torch.randn(dpadded.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return {"dpadded": noise.to(dpadded), "expert": expert, "slot": slot, "bucket": C}

    return [
        spec.KernelOp(
            name="moe_dispatch",
            inputs=inputs,
            sizes="B T K E D C",
            kernels=(kernel.moe_dispatch_bwd_kernel,),
            eager=(moe_dispatch_backward_eager,),
            gradients="",
            blocks={(kernel, name): 16 for name in ("SLOTS_BLOCK", "ROWS_BLOCK", "BACKWARD_BLOCK")},
            dtypes=tuple(spec.INTERPRETED_DTYPES),
            cases=[*map(spec.KernelCase, SIZES)],
            # The sizes with dropped or unassigned tokens.
            faulty=[*map(spec.KernelCase, SIZES[1:])],
            faults={
                "dropped ones": spec.Fault(
                    {"expert": lambda ids: ids.clamp(min=0), "slot": lambda s: s.clamp(min=0)}
                )
            },
            layouts=[spec.KernelCase(SIZES[1])],
        )
    ]


def null_routing(C: int, **sizes: Any) -> tuple[Tensor, Tensor, int]:
    """Return x, the experts with id 1 unassigned, in a strided tensor, and the bucket."""
    x, expert = make_inputs(**sizes, seed=sizes["T"])
    return x, expert.where(expert != 1, -1).repeat_interleave(2, -1)[..., ::2], C


SIZES = [(1, 1, 1, 3, 5, 1), (2, 11, 3, 5, 20, 5), (1, 9, 2, 4, 16, 18), (2, 6, 6, 7, 33, 3)]
SMALL = {"T": 5, "K": 2, "D": 2, "dtype": torch.float64}
SPEC = spec.OpSpec(
    name="moe_dispatch",
    run=partial(moe_dispatch, **EXPERTS),
    inputs=make_inputs,
    names=NAMES,
    cases={f"bucket {C}": spec.Case({"dtype": torch.float64}, {"bucket": C}) for C in (1, 2, 8, 16)},
    rounding=1e-13,
    sizes={
        "B": st.integers(1, 3),
        "T": st.integers(1, 17),
        "K": st.integers(1, 4),
        "dtype": st.just(torch.float64),
        "routing": st.sampled_from(["distinct", "repeated", "some null", "all null"]),
    },
    gradcheck={f"bucket {C}": spec.Case(SMALL, {"bucket": C}) for C in (1, 4)},
    refusals=refusals,
    elementwise=True,
    comparisons={
        "": spec.Comparison(
            op=partial(moe_dispatch, num_experts=E),
            inputs=spec.naming(NAMES, make_inputs, T=40, K=5, D=16),
            cases={"": spec.Case(options={"bucket": 32})},
            rows={"gradient_error_ratio": 2.0},
        )
    },
    golden=spec.Golden(
        lambda: spec.by_name(NAMES, make_inputs(dtype=torch.float64)),
        ("padded", "slot", "overflow"),
        partial(moe_dispatch, **EXPERTS),
    ),
    timed={"moe_dispatch-E64-K6": spec.Timed(workload)},
    interpreter=interpreter,
)
