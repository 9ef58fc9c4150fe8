"""attention: causal attention of grouped heads over packed documents, with a window and a softcap.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first: the op folds the
heads into one product and rebuilds its softmax from the logsumexp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels._documents import seen_by
from kernels.attention import attention
from kernels.attention.eager import attention_backward_eager, attention_forward_with_lse
from suites.ops import spec
from suites.ops.spec import Named, largest_norm

NAMES = "q k v doc_ids"


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and documents: three of them in row 0 (ids 5, 1, 3), two in the others, then padding."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    return *(t.to(device, dtype) for t in tensors), spec.packed_documents(B, T).to(device)


def peer_inputs(device: str = "cpu") -> tuple[Tensor, ...]:
    """Return inputs with a head dim that every peer supports and without padding."""
    q, k, v, doc_ids = make_inputs(T=96, P=64, dtype=torch.bfloat16, device=device)
    return q, k, v, doc_ids.where(doc_ids >= 0, 9)


def refusals(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"k": k[:, :, :1].repeat(1, 1, 3, 1)}, "4 query heads"),
        ({"q": q[0]}, "3-d"),
        ({"k": k[:, :3]}, "k has shape"),
        ({"v": v[..., :3]}, "v has shape"),
        ({"doc_ids": doc_ids[:, :3]}, "doc_ids has shape"),
        ({"k": k.bfloat16()}, "one float dtype"),
        ({"doc_ids": doc_ids.long()}, "int32"),
        ({"softcap": -1.0}, "softcap"),
        ({"window": -1}, "window"),
    ]


def workload(B: int, Hq: int, Hkv: int, P: int, softcap: float) -> spec.Workload:
    T = spec.T
    q, k, v = spec.draw(B, T, Hq, P), spec.draw(B, T, Hkv, P), spec.draw(B, T, Hkv, P)
    inputs = (q, k, v, spec.one_document(B))
    moved, flops = spec.streaming(inputs, (q,)), 4 * B * Hq * P * T * T / 2
    # Two products forward; five backward.
    work = spec.Work(moved.forward_bytes, moved.both_bytes, flops, 3.5 * flops)
    others = [spec.OtherPeer("flash-attn 4", "flash-attn-4", partial(attention, softcap=softcap, impl="fa4"))]
    if not softcap:  # SDPA has none
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA's flash": SDPBackend.FLASH_ATTENTION}
        others += [spec.OtherPeer(name, "", partial(sdpa, backend)) for name, backend in backends.items()]
    return spec.Workload(*spec.by_impl(attention, softcap=softcap), inputs, work, tuple(others))


def sdpa(backend: SDPBackend, *inputs: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return attention(*inputs, impl="sdpa")


def interpreter() -> list[spec.KernelOp]:
    from kernels.attention import kernel

    # Many blocks at a small T, wider than high and higher than wide.
    tiles = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}

    def inputs(whole_blocks: bool = False, **sizes: Any) -> Named:
        """whole_blocks: one document, so that most blocks need no mask, and on both sides none does; weights span
        e^64.
        """
        made = spec.by_name(NAMES, make_inputs(**sizes))
        if whole_blocks:
            q, k = made["q"], made["k"]
            k[:, 16:32] = -4 * q[:, :1, :1]  # row 0 sees the least logits first
            k[:, 32:48] = 4 * q[:, :1, :1]
            made["doc_ids"].zero_()
        return made

    def whole(causal: bool) -> spec.KernelCase:
        options = {"scale": 1.0, "softcap": 32.0, "causal": causal}
        return spec.KernelCase((1, 64, 2, 1, 16), options, {"whole_blocks": True})

    def on_gpu(T: int, P: int, dtype: str) -> spec.KernelCase:
        options = {"scale": P**-0.5, "softcap": 30.0}
        return spec.KernelCase((1, T, 2, 1, P), options, dtypes=(dtype,), gpu_blocks=True)

    return [
        spec.KernelOp(
            name="attention",
            inputs=inputs,
            sizes="B T Hq Hkv P",
            kernels=(kernel.attention_fwd_kernel, kernel.attention_bwd_kernel),
            eager=(attention_forward_with_lse, attention_backward_eager),
            results="out lse",
            gradients="dout",
            options={"scale": 0.25, "softcap": 0.0, "window": 0, "causal": True},
            blocks={(kernel, "_tiles"): lambda P, dtype: tiles},
            cases=[
                *(spec.KernelCase((1, 61, 2, 1, 16), options) for options in KERNEL_OPTIONS),
                *(spec.KernelCase(sizes, {"softcap": 2.0}) for sizes in SIZES),
                *(on_gpu(*sizes) for sizes in GPU_SIZES),
                *map(whole, (True, False)),
            ],
            faulty=[spec.KernelCase((1, 30, 2, 2, 16), {"softcap": 2.0, "window": 7}, dtypes=("fp16",))],
            faults={
                "softcap": spec.Fault({"softcap": 2.1}),
                "window": spec.Fault({"window": 8}),
                "causal": spec.Fault({"causal": False}),
                "documents": spec.Fault({"doc_ids": torch.zeros_like}),
                "heads": spec.Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
            },
            layouts=[spec.KernelCase((1, 20, 2, 1, 16), {"softcap": 2.0}, dtypes=("fp16",))],
            refused=[
                spec.KernelCase((1, 2, 1, 1, P), error=f"power of two up to 128, not {P}$") for P in (48, 256)
            ],
            poisoned=[
                spec.KernelCase((1, 96, 2, 1, 16), {"softcap": 2.0, "causal": False}, dtypes=("fp32",))
            ],
            one_key=[spec.KernelCase((2, 1, 2, 1, 16), {"softcap": 2.0})],
            per_token=("q", "k", "v"),
            lse=True,
        )
    ]


# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
KERNEL_OPTIONS = [
    {},
    {"softcap": 2.0},
    {"scale": 3.0, "softcap": 5.0},
    {"softcap": 100.0},
    {"window": 21},
    {"softcap": 2.0, "causal": False},
    {"softcap": 30.0, "window": 9, "causal": False},
]
SIZES = [(2, 33, 4, 2, 16), (1, 48, 3, 1, 8), (2, 5, 2, 2, 4)]
# T, P and the dtype. An H200 runs whole tiles at P 64 and 128 in hopper.py, and not here.
GPU_SIZES = [(256, 64, "fp16"), (130, 128, "fp16"), (256, 128, "fp16"), (64, 32, "fp32")]
CASES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 5},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 5},
    "all": {"scale": 0.4, "softcap": 2.0, "window": 7},
}
# Shapes of kernels/attention/hopper.py: three blocks of 128, documents that end inside them. A softcap above 32, and
# fp16, follow the largest logit through all blocks; a smaller one through the masked ones only.
WHOLE_TILES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "large softcap": {"softcap": 40.0},
    "softcap, large logits": {"softcap": 30.0, "scale": 4.0},
    "window": {"window": 150, "softcap": 2.0},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 150},
}
SMALL = {"B": 1, "T": 6, "Hq": 4, "Hkv": 2, "P": 3}


def rounding_bound(i: Named, exact: Named) -> Named:
    """Bound the rounding error of `out` in fp32.

    A logit is off by (P + 4) u times its largest size, a weight exp(s - lse) by twice that plus the same of lse, and
    the weighted mean of v adds T + 8 roundings: all of it relative to max |v|.
    """
    T, P = i["q"].shape[1], i["q"].shape[3]
    logit = i.get("scale", P**-0.5) * largest_norm(i["q"]) * largest_norm(i["k"])
    return {"0": (2 * (P + 4) * logit + T + 8) * 2**-24 * i["v"].double().abs().max()}


def whole_tiles(P: int) -> spec.Comparison:
    return spec.Comparison(
        op=attention,
        inputs=spec.naming(NAMES, make_inputs, T=384, P=P, Hq=6),
        cases={name: spec.Case(options=options) for name, options in WHOLE_TILES.items()},
        id=f"kernels/attention-P{P}-whole_tiles-{{torch}}",
        only_on_gpu=True,
    )


SPEC = spec.OpSpec(
    name="attention",
    run=attention,
    inputs=make_inputs,
    names=NAMES,
    cases={name: spec.Case(options=options) for name, options in CASES.items()},
    sizes={"T": st.integers(1, 12), "Hkv": st.sampled_from([1, 2]), "Hq": st.sampled_from([2, 4, 6])},
    gradcheck={name: spec.Case(SMALL, CASES[name]) for name in ("plain", "all")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic="q k v doc_ids",
    compiled={"softcap": 2.0},
    refusals=refusals,
    bad={"B": 2, "T": 4, "Hq": 4, "Hkv": 2, "P": 4, "dtype": torch.float32},
    loses_digits=True,
    from_output=("q", "k"),
    comparisons={
        "": spec.Comparison(
            op=attention,
            inputs=spec.naming(NAMES, make_inputs, B=4),
            cases={name: spec.Case(options=options) for name, options in CASES.items()},
            faults=spec.DROPPED_RESET,
            bound=rounding_bound,
            wrong={
                "softcap before scale": spec.Fault({"softcap": 2.0 / 0.4}),
                "no softcap": spec.Fault({"softcap": 0.0}),
                "window one too wide": spec.Fault({"window": 8}),
                "documents ignored": spec.Fault({"doc_ids": spec.one_row}),
                "heads interleaved": spec.Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
                "not causal": spec.Fault({"causal": False}),
            },
        ),
        "whole tiles, P 64": whole_tiles(64),
        "whole tiles, P 128": whole_tiles(128),
    },
    documents=spec.Documents(
        inputs=spec.naming(NAMES, make_inputs),
        per_token=("q", "k", "v", "doc_ids"),
        keys=("k", "v"),
        sees=lambda i: seen_by(i["doc_ids"], i.get("window", 0), i.get("causal", True)),
        cases=CASES,
        rounding=1e-13,
    ),
    golden=spec.Golden(
        lambda: spec.by_name(NAMES, make_inputs(P=8)), ("out",), partial(attention, **CASES["all"])
    ),
    timed={
        "attention-P128-softcap30": spec.Timed(partial(workload, Hq=32, Hkv=8, P=128, softcap=30.0), 30),
        "attention-P128": spec.Timed(partial(workload, Hq=32, Hkv=8, P=128, softcap=0.0), 30),
        "attention-P64-softcap30": spec.Timed(partial(workload, Hq=56, Hkv=8, P=64, softcap=30.0), 52),
        "attention-P64": spec.Timed(partial(workload, Hq=56, Hkv=8, P=64, softcap=0.0), 52),
    },
    peer="flash-attn 2",
    packages=("flash_attn",),
    peers={
        "attention": spec.Peer(attention, peer_inputs),
        "attention-softcap": spec.Peer(partial(attention, softcap=2.0), peer_inputs),
        "attention-window": spec.Peer(partial(attention, window=9), peer_inputs),
    },
    marks={
        "attention-P128/forward_milliseconds": (1.10, ""),
        "attention-P128/both_milliseconds": (4.9, ""),
        "attention-P128-softcap30/forward_milliseconds": (
            1.35,
            "the special functions, 64 % busy: tanh and exp2 of each logit; tensor cores 43 %, without the softcap "
            "58 %. With every second exp2 on the FMA units it takes 1.348 ms in a form that loses NaNs, and 1.479 ms "
            "in one that keeps them",
        ),
        "attention-P128-softcap30/both_milliseconds": (5.9, ""),
    },
    interpreter=interpreter,
)
