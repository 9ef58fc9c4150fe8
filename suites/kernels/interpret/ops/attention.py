"""The interpreted kernels of attention.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import torch

from kernels.attention import kernel
from kernels.attention.eager import attention_backward_eager, attention_forward_with_lse
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes

# Many blocks at a small T, wider than high and higher than wide.
TILES = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
OPTIONS = [
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


def make_inputs(
    B: int, T: int, Hq: int, Hkv: int, P: int, dtype: torch.dtype, whole_blocks: bool = False
) -> Named:
    """Row 0 holds documents 5, 1, 3 and padding, the others 1, 3 and padding.

    whole_blocks: one document, so that most blocks need no mask, and on both sides none does; weights span e^64.
    """
    g = torch.Generator().manual_seed(T)
    q, k, v, dout = (
        torch.randn(B, T, H, P, generator=g, dtype=torch.float64).to(dtype) for H in (Hq, Hkv, Hkv, Hq)
    )
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    if whole_blocks:
        k[:, 16:32] = -4 * q[:, :1, :1]  # row 0 sees the least logits first
        k[:, 32:48] = 4 * q[:, :1, :1]
        doc_ids.zero_()
    options = {"scale": 0.25, "softcap": 0.0, "window": 0, "causal": True}
    return {"q": q, "k": k, "v": v, "doc_ids": doc_ids, "dout": dout, **options}


OP = KernelOp(
    name="attention",
    launched=passes(kernel.attention_fwd_kernel, kernel.attention_bwd_kernel, "out", "lse"),
    reference=passes(attention_forward_with_lse, attention_backward_eager, "out", "lse"),
    make_inputs=make_inputs,
    blocks={(kernel, "_tiles"): lambda P, dtype: TILES},
    cases=[
        *(Case((1, 61, 2, 1, 16), options) for options in OPTIONS),
        *(Case(sizes, {"softcap": 2.0}) for sizes in SIZES),
        *(
            Case((1, T, 2, 1, P), {"scale": P**-0.5, "softcap": 30.0}, dtypes=(dtype,), gpu_blocks=True)
            for T, P, dtype in GPU_SIZES
        ),
        *(
            Case((1, 64, 2, 1, 16), {"scale": 1.0, "softcap": 32.0, "causal": causal}, {"whole_blocks": True})
            for causal in (True, False)
        ),
    ],
    faulty=[Case((1, 30, 2, 2, 16), {"softcap": 2.0, "window": 7}, dtypes=("fp16",))],
    faults={
        "softcap": Fault({"softcap": 2.1}),
        "window": Fault({"window": 8}),
        "causal": Fault({"causal": False}),
        "documents": Fault({"doc_ids": torch.zeros_like}),
        "heads": Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
    },
    layouts=[Case((1, 20, 2, 1, 16), {"softcap": 2.0}, dtypes=("fp16",))],
    refused=[Case((1, 2, 1, 1, P), error=f"power of two up to 128, not {P}$") for P in (48, 256)],
    poisoned=[Case((1, 96, 2, 1, 16), {"softcap": 2.0, "causal": False}, dtypes=("fp32",))],
    one_key=[Case((2, 1, 2, 1, 16), {"softcap": 2.0})],
    per_token=("q", "k", "v"),
    gradient="dout",
    lse=True,
)
