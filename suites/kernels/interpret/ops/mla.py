"""The interpreted kernels of mla.

B batch, T tokens, H heads, C latent dim, P, R and V head dims of q.k without and with position and of the values.
"""

from __future__ import annotations

import torch

from kernels.mla import kernel
from kernels.mla.eager import mla_backward_eager, mla_forward_with_lse
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, Outputs, passes
from suites.support.reduce import largest

# Many blocks at a small T, wider than high and higher than wide.
TILES = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
OPTIONS = [
    {},
    {"softcap": 2.0},
    {"scale": 3.0, "softcap": 5.0},
    {"softcap": 100.0},
    {"softcap": 2.0, "causal": False},
]
# At 195 tokens a block of queries has a full block of keys before its own, in a document that begins inside a block.
SIZES = [(2, 33, 2, 16, 16, 8, 32), (1, 48, 1, 5, 8, 16, 4), (2, 1, 1, 3, 4, 2, 16), (1, 195, 1, 5, 8, 4, 8)]
GPU_SIZES = [(256, 64, "fp16"), (40, 128, "fp16"), (32, 32, "fp32")]  # T, P and the dtype
NAMES = ("q_nope", "q_rope", "c_kv", "k_rope", "W_uk", "W_uv", "dout")


def make_inputs(B: int, T: int, H: int, C: int, P: int, R: int, V: int, dtype: torch.dtype) -> Named:
    """Row 0 holds documents 5, 1, 3 and padding, the others 1, 3 and padding."""
    g = torch.Generator().manual_seed(T)
    shapes = (B, T, H, P), (B, T, H, R), (B, T, C), (B, T, R), (H, P, C), (H, V, C), (B, T, H, V)
    inputs = {n: torch.randn(*s, generator=g, dtype=torch.float64) for n, s in zip(NAMES, shapes)}
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    scaled = {n: t * C**-0.5 if n.startswith("W") else t for n, t in inputs.items()}
    options = {"scale": 0.25, "softcap": 0.0, "causal": True}
    return {n: t.to(dtype) for n, t in scaled.items()} | {"doc_ids": doc_ids, **options}


def terms(oracle: Outputs) -> float:
    """With a single key its weight is 1 for any score: the gradients of q and k are differences of equals."""
    out, _, *gradients = oracle
    return largest(float(t.abs().max()) for t in (out, *gradients)) if out.shape[1] == 1 else 0.0


OP = KernelOp(
    name="mla",
    launched=passes(kernel.mla_fwd_kernel, kernel.mla_bwd_kernel, "out", "lse"),
    reference=passes(mla_forward_with_lse, mla_backward_eager, "out", "lse"),
    make_inputs=make_inputs,
    blocks={(kernel, "_tiles"): lambda *dims: TILES},
    cases=[
        *(Case((1, 41, 1, 16, 16, 16, 16), options) for options in OPTIONS),
        *(Case(sizes, {"softcap": 2.0}) for sizes in SIZES),
        *(
            Case((1, T, 1, 64, P, 64, P), {"scale": 0.1, "softcap": 30.0}, dtypes=(dtype,), gpu_blocks=True)
            for T, P, dtype in GPU_SIZES
        ),
    ],
    faulty=[Case((1, 20, 2, 16, 16, 16, 16), {"softcap": 2.0})],
    faults={
        "softcap": Fault({"softcap": 2.2}),
        "causal": Fault({"causal": False}),
        "documents": Fault({"doc_ids": torch.zeros_like}),
        "position": Fault({"k_rope": lambda k: k.roll(1, 1)}),
        "heads": Fault({"W_uk": lambda W: W.flip(0)}),
    },
    layouts=[Case((1, 20, 1, 16, 16, 16, 16), {"softcap": 2.0}, dtypes=("fp32",))],
    layout_rounding=1e-5,
    refused=[
        Case((1, 2, 1, 4, P, 16, 16), error=f"powers of two up to 128, not {P}, 16 and 16$")
        for P in (48, 256)
    ],
    poisoned=[Case((1, 96, 2, 16, 16, 16, 16), {"softcap": 2.0, "causal": False}, dtypes=("fp32",))],
    per_token=("q_nope", "q_rope", "c_kv", "k_rope"),
    gradient="dout",
    narrow_products=True,
    lse=True,
    terms=terms,
)
