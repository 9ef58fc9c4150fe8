"""causal_conv1d: a causal convolution of each channel, inside its document.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels._documents import seen_by
from kernels.causal_conv1d import causal_conv1d
from kernels.causal_conv1d.eager import causal_conv1d_backward_eager, causal_conv1d_eager
from kernels.causal_conv1d.naive import causal_conv1d_naive
from suites.ops import spec
from suites.ops.spec import Named

LENGTHS = (9, 1, 2, 13, 5)
NAMES = "x weight bias doc_ids"


def make_inputs(
    B=2, D=8, W=4, lengths=LENGTHS, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random x, weight, bias and documents of these lengths in row 0, rotated by one token per further row; the
    last is padding (-1).
    """
    g = torch.Generator().manual_seed(seed)
    names = [*range(3, 2 + len(lengths)), -1]
    ids = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in zip(names, lengths)])
    doc_ids = torch.stack([ids.roll(row) for row in range(B)])
    shapes = ((B, len(ids), D), (D, W), (D,))
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return *(t.to(device, dtype) for t in tensors), doc_ids.to(device)


def peer_inputs(device: str) -> tuple[Tensor, ...]:
    return make_inputs(D=64, W=4, dtype=torch.bfloat16, device=device)


def refusals(x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"x": x[0]}, "2-d"),
        ({"weight": weight[:3]}, "weight has shape"),
        ({"weight": weight[:, :0]}, "at least one tap"),
        ({"bias": bias[:3]}, "bias has shape"),
        ({"doc_ids": doc_ids[:, 1:]}, "doc_ids has shape"),
        ({"x": x.int()}, "x must be floating point"),
        ({"doc_ids": doc_ids.long()}, "int32"),
        ({"activation": "relu"}, "choices are"),
    ]


def rounding_bound(i: Named, exact: Named) -> Named:
    """Bound the rounding error of y in fp32.

    A sum of W products and a bias is off by at most (W + 1) u times the same sum of absolute values; silu scales an
    error by at most 1.1 and adds a few of its own roundings (8 u).
    """
    sizes = {n: i[n].double().abs() for n in ("x", "weight", "bias")}
    total = causal_conv1d_naive(**sizes, doc_ids=i["doc_ids"], activation="none")
    return {"0": 2**-24 * (1.1 * (i["weight"].shape[1] + 1) * total + 8 * exact["0"].abs())}


def workload(B: int) -> spec.Workload:
    D, W = 3584, 4
    x, weight, bias = spec.draw(B, spec.T, D), spec.draw(D, W), spec.draw(D)
    inputs = (x, weight, bias, spec.one_document(B))
    return spec.Workload(*spec.by_impl(causal_conv1d), inputs, spec.streaming(inputs, (x,)))


def interpreter() -> list[spec.KernelOp]:
    from kernels.causal_conv1d import kernel

    small = {"SPAN": 4, "BD": 16}

    def inputs(T: int, W: int, **sizes: Any) -> Named:
        """A document begins after 1, 2, 3 and 5 tokens; the ids go 0, 1, 0, 1."""
        made = spec.by_name(NAMES, make_inputs(D=20, W=W, lengths=(1,) * T, **sizes))
        begins = torch.zeros(2, T, dtype=torch.int32)
        for row in range(2):
            begins[row, [t + row for t in (1, 2, 3, 5) if t + row < T]] = 1
        return made | {"doc_ids": begins.cumsum(1).int() % 2}

    return [
        spec.KernelOp(
            name="causal_conv1d",
            inputs=inputs,
            sizes="T W",
            kernels=(kernel.causal_conv1d_fwd_kernel, kernel.causal_conv1d_bwd_kernel),
            eager=(causal_conv1d_eager, causal_conv1d_backward_eager),
            options={"activation": "silu"},
            blocks={(kernel, name): getattr(kernel, name) | small for name in ("FORWARD", "BACKWARD")},
            dtypes=tuple(spec.INTERPRETED_DTYPES),
            cases=[spec.KernelCase((T, W), {"activation": activation}) for T, W, activation in SIZES],
            faulty=[spec.KernelCase((11, 4), dtypes=("fp16",))],
            faults={"documents": spec.Fault({"doc_ids": torch.zeros_like})},
            poisoned=[spec.KernelCase((11, 4), dtypes=("fp32",))],
            per_token=("x",),
            layouts=[spec.KernelCase((11, 4), dtypes=("fp16",))],
        )
    ]


SIZES = [(1, 4, "silu"), (2, 3, "none"), (6, 1, "silu"), (8, 5, "none"), (11, 4, "silu")]
ACTIVATIONS = {name: {"activation": name} for name in ("silu", "none")}
SMALL = {"B": 2, "D": 2, "W": 3, "lengths": (1, 3, 2)}
SPEC = spec.OpSpec(
    name="causal_conv1d",
    run=causal_conv1d,
    inputs=make_inputs,
    names=NAMES,
    cases={
        f"W{W}-{name}": spec.Case({"W": W}, options)
        for W in (1, 2, 3, 4)
        for name, options in ACTIVATIONS.items()
    },
    sizes={"W": st.integers(1, 4), "lengths": st.integers(1, 20).map(lambda T: (T,))},
    gradcheck={name: spec.Case(SMALL, options) for name, options in ACTIVATIONS.items()},
    batches=[{"B": B} for B in (2, 3, 5)],
    dynamic="x doc_ids",
    refusals=refusals,
    bad={"dtype": torch.float32},
    free=("weight", "bias"),
    elementwise=True,
    contract={"D 3": spec.Case({"D": 3, "lengths": (5, 2)})},
    comparisons={
        "": spec.Comparison(
            op=causal_conv1d,
            inputs=spec.naming(NAMES, make_inputs, D=64),
            cases={f"width {W}": spec.Case({"W": W}) for W in (2, 3, 4)},
            rows={"forward_error_ratio": 2.0, "gradient_error_ratio": 2.0},
            faults=spec.DROPPED_RESET,
            bound=rounding_bound,
            wrong={
                "taps reversed": spec.Fault({"weight": lambda weight: weight.flip(1)}),
                "documents ignored": spec.Fault({"doc_ids": spec.one_row}),
                "no bias": spec.Fault({"bias": torch.zeros_like}),
                "no activation": spec.Fault({"activation": "none"}),
            },
            share=0.2,
        )
    },
    documents=spec.Documents(
        inputs=lambda T, **sizes: spec.by_name(NAMES, make_inputs(lengths=(1,) * T, **sizes)),
        per_token=("x", "doc_ids"),
        keys=("x",),
        sees=lambda i: seen_by(i["doc_ids"], i["weight"].shape[1]),
        # The vectorized and the scalar form of silu round differently.
        cases={"sums": {"activation": "none"}},
        rounding=0.0,
    ),
    golden=spec.Golden(lambda: spec.by_name(NAMES, make_inputs()), ("y",), causal_conv1d),
    timed={"causal_conv1d-D3584": spec.Timed(workload)},
    peer="causal-conv1d",
    packages=("causal_conv1d",),
    peers={"causal_conv1d": spec.Peer(causal_conv1d, peer_inputs)},
    marks={
        "causal_conv1d-D3584/forward_milliseconds": (0.080, ""),
        "causal_conv1d-D3584/both_milliseconds": (0.36, ""),
    },
    interpreter=interpreter,
)
