"""mla: attention over a latent of the keys and values.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels._documents import seen_by
from kernels.mla import mla, mla_absorbed
from kernels.mla.eager import mla_backward_eager, mla_forward_with_lse
from suites.ops import spec
from suites.ops.spec import Named, Outputs
from suites.support.reduce import largest

NAMES = "q_nope q_rope c_kv k_rope W_uk W_uv doc_ids"


def make_inputs(
    B=2, T=33, H=3, C=16, P=16, R=8, Pv=32, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, ...]:
    """Return random inputs in the order of NAMES, with packed documents."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = (
        draw(B, T, H, P), draw(B, T, H, R), draw(B, T, C), draw(B, T, R),
        draw(H, P, C) * C**-0.5, draw(H, Pv, C) * C**-0.5,
    )  # fmt: skip
    return *(t.to(device, dtype) for t in tensors), spec.packed_documents(B, T).to(device)


def rounding_bound(i: Named, exact: Named) -> Named:
    """Bound the rounding error of `out` in fp32.

    A key is off by C u of its size and a logit by P + R + C + 4 of them, a weight exp(s - lse) by twice that, and the
    weighted mean of v adds T + C + 8 roundings: all of it relative to the largest |v|.
    """
    widths = i["q_nope"].shape[3] + i["q_rope"].shape[3]
    T, C = i["c_kv"].shape[1:]
    c = spec.largest_norm(i["c_kv"])
    nope = spec.largest_norm(i["q_nope"]) * c * spec.largest_norm(i["W_uk"].flatten(1))
    rope = spec.largest_norm(i["q_rope"]) * spec.largest_norm(i["k_rope"])
    logit = i.get("scale", widths**-0.5) * (nope + rope)
    largest = c * spec.largest_norm(i["W_uv"])
    return {"0": torch.tensor((2 * (widths + C + 4) * logit + T + C + 8) * 2**-24 * largest)}


def refusals(**i: Any) -> list[tuple[Named, str]]:
    """Return what both forms refuse (mla and mla_absorbed)."""
    return [
        ({"q_nope": i["q_nope"][0]}, "3-d"),
        ({"c_kv": i["c_kv"][0]}, r"c_kv \(B,T,C\).*2-d"),
        ({"q_rope": i["q_rope"][:, :3]}, "q_rope has shape"),
        ({"k_rope": i["k_rope"][..., :1]}, "k_rope has shape"),
        ({"W_uk": i["W_uk"][:1]}, "W_uk has shape"),
        ({"W_uv": i["W_uv"][..., :3]}, "W_uv has shape"),
        ({"doc_ids": i["doc_ids"][:, :3]}, "doc_ids has shape"),
        ({"W_uv": i["W_uv"].bfloat16()}, "one float dtype"),
        ({"doc_ids": i["doc_ids"].long()}, "int32"),
        ({"softcap": -1.0}, "softcap"),
    ]


def workload(B: int, softcap: float) -> spec.Workload:
    T, H, C, P, R, V = spec.T, 56, 64, 64, 64, 64
    inputs = (
        spec.draw(B, T, H, P), spec.draw(B, T, H, R), spec.draw(B, T, C), spec.draw(B, T, R),
        spec.draw(H, P, C) * C**-0.5, spec.draw(H, V, C) * C**-0.5, spec.one_document(B),
    )  # fmt: skip
    moved = spec.streaming(inputs, (spec.draw(B, T, H, V),))
    pairs, up = 2 * B * H * T * T / 2, 2 * B * T * C * H * (P + V)
    flops, backward = pairs * (P + R + V) + up, pairs * (3 * (P + R) + 2 * V) + 2 * up
    work = spec.Work(moved.forward_bytes, moved.both_bytes, flops, flops + backward)
    return spec.Workload(*spec.by_impl(mla, peer=False, softcap=softcap), inputs, work)


def interpreter() -> list[spec.KernelOp]:
    from kernels.mla import kernel

    # Many blocks at a small T, wider than high and higher than wide.
    tiles = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}

    def terms(oracle: Outputs) -> float:
        """With a single key its weight is 1 for any score: the gradients of q and k are differences of equals."""
        out, _, *gradients = oracle
        return largest(float(t.abs().max()) for t in (out, *gradients)) if out.shape[1] == 1 else 0.0

    def on_gpu(T: int, P: int, dtype: str) -> spec.KernelCase:
        options = {"scale": 0.1, "softcap": 30.0}
        return spec.KernelCase((1, T, 1, 64, P, 64, P), options, dtypes=(dtype,), gpu_blocks=True)

    return [
        spec.KernelOp(
            name="mla",
            inputs=SPEC.named,
            sizes="B T H C P R Pv",
            kernels=(kernel.mla_fwd_kernel, kernel.mla_bwd_kernel),
            eager=(mla_forward_with_lse, mla_backward_eager),
            results="out lse",
            gradients="dout",
            options={"scale": 0.25, "softcap": 0.0, "causal": True},
            blocks={(kernel, "_tiles"): lambda *dims: tiles},
            cases=[
                *(spec.KernelCase((1, 41, 1, 16, 16, 16, 16), options) for options in KERNEL_OPTIONS),
                *(spec.KernelCase(sizes, {"softcap": 2.0}) for sizes in SIZES),
                *(on_gpu(*sizes) for sizes in GPU_SIZES),
            ],
            faulty=[spec.KernelCase((1, 20, 2, 16, 16, 16, 16), {"softcap": 2.0})],
            faults={
                "softcap": spec.Fault({"softcap": 2.2}),
                "causal": spec.Fault({"causal": False}),
                "documents": spec.Fault({"doc_ids": torch.zeros_like}),
                "position": spec.Fault({"k_rope": lambda k: k.roll(1, 1)}),
                "heads": spec.Fault({"W_uk": lambda W: W.flip(0)}),
            },
            layouts=[spec.KernelCase((1, 20, 1, 16, 16, 16, 16), {"softcap": 2.0}, dtypes=("fp32",))],
            layout_rounding=1e-5,
            refused=[
                spec.KernelCase(
                    (1, 2, 1, 4, P, 16, 16), error=f"powers of two up to 128, not {P}, 16 and 16$"
                )
                for P in (48, 256)
            ],
            poisoned=[
                spec.KernelCase(
                    (1, 96, 2, 16, 16, 16, 16), {"softcap": 2.0, "causal": False}, dtypes=("fp32",)
                )
            ],
            per_token=("q_nope", "q_rope", "c_kv", "k_rope"),
            narrow_products=True,
            lse=True,
            terms=terms,
        )
    ]


# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
KERNEL_OPTIONS = [
    {},
    {"softcap": 2.0},
    {"scale": 3.0, "softcap": 5.0},
    {"softcap": 100.0},
    {"softcap": 2.0, "causal": False},
]
# At 195 tokens a block of queries has a full block of keys before its own, in a document that begins inside a block.
SIZES = [(2, 33, 2, 16, 16, 8, 32), (1, 48, 1, 5, 8, 16, 4), (2, 1, 1, 3, 4, 2, 16), (1, 195, 1, 5, 8, 4, 8)]
GPU_SIZES = [(256, 64, "fp16"), (40, 128, "fp16"), (32, 32, "fp32")]  # T, P and the dtype
CASES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "not causal": {"causal": False},
    "softcap and scale": {"softcap": 2.0, "scale": 0.4},
}
SMALL = {"B": 1, "T": 5, "H": 2, "C": 3, "P": 2, "R": 2, "Pv": 3}
SPEC = spec.OpSpec(
    name="mla",
    run=mla,
    inputs=make_inputs,
    names=NAMES,
    cases={name: spec.Case(options=options) for name, options in CASES.items()},
    gradcheck={name: spec.Case(SMALL, CASES[name]) for name in ("plain", "softcap and scale")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic="q_nope q_rope c_kv k_rope doc_ids",
    compiled={"softcap": 2.0},
    refusals=refusals,
    bad={"B": 2, "T": 4, "H": 2, "C": 4, "P": 4, "R": 2, "Pv": 4, "dtype": torch.float32},
    loses_digits=True,
    from_output=("q_nope", "q_rope", "c_kv", "k_rope", "W_uk"),
    comparisons={
        # A row with one key has a gradient of 0, and the rounding noise of either side is random.
        "": spec.Comparison(
            op=mla,
            inputs=spec.naming(NAMES, make_inputs, B=4),
            seeds=4,
            cases={
                "wide heads": spec.Case({"P": 128, "R": 64, "Pv": 128}, {"softcap": 2.0}),
                # A block of queries has full blocks of keys, in a document that begins inside a block.
                "many blocks": spec.Case({"B": 1, "T": 1035, "H": 1}, {"softcap": 2.0}),
                **{name: spec.Case(options=options) for name, options in CASES.items()},
            },
            faults=spec.DROPPED_RESET,
            bound=rounding_bound,
            forms=[mla_absorbed],
            wrong={
                "softcap before scale": spec.Fault({"softcap": 2.0 / 0.4}),
                "no softcap": spec.Fault({"softcap": 0.0}),
                "not causal": spec.Fault({"causal": False}),
                "scale of P alone": spec.Fault({"scale": 16**-0.5}),
                "documents ignored": spec.Fault({"doc_ids": spec.one_row}),
                "no positions": spec.Fault({"k_rope": torch.zeros_like}),
                "keys of other heads": spec.Fault({"W_uk": lambda W: W.roll(1, 0)}),
                "values of other heads": spec.Fault({"W_uv": lambda W: W.roll(1, 0)}),
                "a transposed W_uk": spec.Fault({"W_uk": lambda W: W.mT}),
            },
        )
    },
    documents=spec.Documents(
        inputs=spec.naming(NAMES, make_inputs, H=2),
        per_token=("q_nope", "q_rope", "c_kv", "k_rope", "doc_ids"),
        keys=("c_kv", "k_rope"),
        sees=lambda i: seen_by(i["doc_ids"], causal=i.get("causal", True)),
        cases=CASES,
        rounding=1e-12,
    ),
    golden=spec.Golden(
        lambda: spec.by_name(NAMES, make_inputs(T=20, C=8, P=8, R=4, Pv=8)),
        ("out",),
        partial(mla, **CASES["softcap and scale"]),
    ),
    timed={
        "mla-P64-softcap30": spec.Timed(partial(workload, softcap=30.0), 52),
        "mla-P64": spec.Timed(partial(workload, softcap=0.0), 52),
    },
    interpreter=interpreter,
)
