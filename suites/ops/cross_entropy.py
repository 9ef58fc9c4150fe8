"""cross_entropy: the loss of each token, of capped logits.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from kernels.cross_entropy import cross_entropy
from kernels.cross_entropy.eager import cross_entropy_backward_eager, cross_entropy_with_sums
from suites.ops import spec
from suites.ops.spec import Named, Outputs

NAMES = "logits target"
IGNORE = -100


def make_inputs(
    B=3, T=5, V=37, dtype=torch.float64, device="cpu", seed=0, ignore_index=IGNORE, scale=2.0
) -> tuple[Tensor, Tensor]:
    """Return random logits (B,T,V) and targets (B,T), of which two are ignored in row 0 and one in the last row."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * scale
    target = torch.randint(0, V, (B, T), generator=g)
    target[0, :2] = target[-1, -1] = ignore_index
    return logits.to(device, dtype), target.to(device)


def refusals(logits: Tensor, target: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"target": target[:2]}, "target has shape"),
        ({"logits": logits[0, 0]}, "target has shape"),
        ({"logits": logits[..., :0]}, "V at least 1"),
        ({"logits": logits.sum()}, "V at least 1"),
        ({"logits": logits.int()}, "logits must be floating point"),
        ({"target": target.int()}, "int64"),
        ({"softcap": -1.0}, "softcap"),
        ({"impl": "upstream"}, "choices are"),
    ]


def rounding_bound(i: Named, exact: Named) -> Named:
    """A capped logit is off by 4 u c, which changes loss and gradient by at most that; exp, sum and log add 64 u."""
    size = i["softcap"] or i["logits"].abs().max()
    return dict.fromkeys(("0", "logits"), 2**-24 * (2 * 4 * size + 64 + i["logits"].shape[-1] ** 0.5))


def workload(B: int, softcap: float) -> spec.Workload:
    """The peer is Inductor's compilation of the model's loss head."""
    V = 65536
    inputs = (spec.draw(B, spec.T, V), torch.randint(0, V, (B, spec.T), device="cuda"))

    def written_out(logits: Tensor, target: Tensor) -> Tensor:
        s = logits.float()
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return F.cross_entropy(s.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)

    op, reference, _ = spec.by_impl(cross_entropy, peer=False, softcap=softcap)
    compiled = torch.compile(written_out, dynamic=False)
    return spec.Workload(op, reference, compiled, inputs, spec.streaming(inputs, ()))


def both_passes(forward: Callable[..., Any], backward: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return functions of loss and logsumexp, and of the gradient, which has its own sums."""

    def loss(logits: Tensor, target: Tensor, softcap: float, ignore_index: int) -> Outputs:
        value, shift, total = forward(logits, target, softcap, ignore_index)
        return value, shift + total.log()

    def gradient(logits: Tensor, target: Tensor, dloss: Tensor, softcap: float, ignore_index: int) -> Tensor:
        _, shift, total = forward(logits, target, softcap, ignore_index)
        return backward(logits, target, shift, total, dloss, softcap, ignore_index)

    return [loss, gradient]


def interpreter() -> list[spec.KernelOp]:
    from kernels.cross_entropy import kernel

    def inputs(V: int, saturated: bool = False, shift: float = 0.0, **sizes: Any) -> Named:
        """Return 4 rows, of which row 2 is ignored, and holds nan.

        saturated: tanh is 1 to the last bit in row 0, where its exponential would overflow.
        shift: added to rows 0 and 1.
        """
        logits, target = (t.flatten(0, 1) for t in make_inputs(B=3, T=2, V=V, scale=4.0, **sizes))
        logits, target = logits[[2, 3, 0, 4]], target[[2, 3, 0, 4]]
        logits[2] = torch.nan
        if saturated:
            logits[0, ::2], logits[0, 1::2] = 6e4, -6e4
        logits[:2] += shift
        return {"logits": logits, "target": target}

    def capped(logits: Tensor) -> Tensor:
        return (3 * torch.tanh(logits / 3)).to(logits.dtype)

    fault_of_last = {"logits": lambda x: x[:, :132], "target": lambda t: t.where(t < 0, t % 132)}
    return [
        spec.KernelOp(
            name="cross_entropy",
            inputs=inputs,
            sizes="V",
            kernels=both_passes(kernel.cross_entropy_fwd_kernel, kernel.cross_entropy_bwd_kernel),
            eager=both_passes(cross_entropy_with_sums, cross_entropy_backward_eager),
            gradients="dloss",
            options={"softcap": 0.0, "ignore_index": IGNORE},
            # Tiles of 128 entries, and the fast softcap for all but the smallest vocabulary.
            blocks={(kernel, "LANES"): 32, (kernel, "SMALLEST_FAST_V"): 100},
            cases=[
                *(
                    spec.KernelCase((V,), {"softcap": softcap})
                    for softcap in SOFTCAPS
                    for V in (1, 101, 256, 300)
                ),
                *(
                    spec.KernelCase((300,), {"softcap": c}, {"saturated": True}, dtypes=("fp16",))
                    for c in (3.0, 32.0)
                ),
                spec.KernelCase((133,), {"softcap": 0.0}, {"shift": 3e4}),
            ],
            faulty=[spec.KernelCase((133,), {"softcap": 3.0})],
            faults={
                "softcap": spec.Fault({"softcap": 3.1}),
                "target": spec.Fault({"target": lambda t: t.where(t < 0, (t + 1) % 133)}, spares=(1,)),
                "slope of the cap": spec.Fault({"logits": capped, "softcap": 0.0}, unseen=(0, 1)),
                "last entry": spec.Fault(fault_of_last, unseen=(2,)),
                "3 % of the gradient": spec.Fault({"dloss": lambda d: d * 1.03}, spares=(0, 1)),
            },
            layouts=[spec.KernelCase((133,), {"softcap": 3.0}, dtypes=("fp16",))],
            expanded=[spec.KernelCase((133,), {"softcap": 3.0}, dtypes=("fp16",))],
            # The results of the ignored row.
            zeros=lambda arguments, loss, lse, dlogits: (loss[2], dlogits[2]),
        )
    ]


# None, "fast" for fp16, "fast" at its limit, "exact".
SOFTCAPS = (0.0, 3.0, 32.0, 50.0)
CASES = {"plain": 0.0, "softcap": 3.0, "wide softcap": 50.0}
SPEC = spec.OpSpec(
    name="cross_entropy",
    run=cross_entropy,
    inputs=make_inputs,
    names=NAMES,
    cases={
        f"{name}, ignoring {i}": spec.Case({"ignore_index": i}, {"softcap": softcap, "ignore_index": i})
        for name, softcap in CASES.items()
        for i in (-100, -1, 3)
    },
    sizes={"V": st.integers(1, 40)},
    gradcheck={f"softcap {c}": spec.Case({"B": 2, "T": 3, "V": 4}, {"softcap": c}) for c in (0.0, 1.5)},
    batches=[{"B": B} for B in (2, 3, 5)],
    dynamic="logits target",
    compiled={"softcap": 15.0},
    refusals=refusals,
    bad={"dtype": torch.float32},
    elementwise=True,
    contract={f"softcap {softcap}": spec.Case({"V": 9}, {"softcap": softcap}) for softcap in (0.0, 15.0)},
    comparisons={
        # V 5000 is several tiles of the kernel and a partial one; logits of 8 make rows dominated by one entry.
        "": spec.Comparison(
            op=cross_entropy,
            inputs=spec.naming(NAMES, make_inputs, B=8, T=64),
            cases={
                f"V {V}, scale {scale}, softcap {softcap}": spec.Case(
                    {"V": V, "scale": scale, **({} if V == 37 else {"T": 16})}, {"softcap": softcap}
                )
                for V, scale in ((5000, 1.0), (5000, 8.0), (37, 2.0))
                for softcap in (0.0, 15.0, 50.0, 3.0)
            },
            faults={"no softcap": spec.changed(softcap=0.0)},
            bound=rounding_bound,
            wrong={
                "no softcap": spec.Fault({"softcap": 0.0}),
                "cap of another scale": spec.Fault({"softcap": 3.1}),
                "next target": spec.Fault({"target": lambda t: t.where(t < 0, (t + 1) % 37)}),
            },
            share=0.02,
        )
    },
    golden=spec.Golden(
        lambda: spec.by_name(NAMES, make_inputs()), ("loss",), partial(cross_entropy, softcap=3.0)
    ),
    timed={
        "cross_entropy-V65536": spec.Timed(partial(workload, softcap=0.0), 16),
        "cross_entropy-V65536-softcap15": spec.Timed(partial(workload, softcap=15.0), 16),
    },
    peer="Inductor",
    interpreter=interpreter,
)
