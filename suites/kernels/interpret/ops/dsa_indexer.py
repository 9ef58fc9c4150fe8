"""The interpreted attention of dsa_indexer over the chosen keys, and inputs of its other kernels.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dsa_indexer import kernel
from kernels.dsa_indexer.eager import (
    dsa_attention_backward_eager,
    dsa_attention_forward_with_lse,
    dsa_choice,
)
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes

# Several blocks at a small T.
TILES = {"gather": (16, 16, 4, 1), "dkdv": (16, 32, 4, 1)}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
OPTIONS = [{}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 5.0}, {"softcap": 100.0}]
SIZES = [(2, 6, 4, 2, 16, 5), (1, 5, 2, 2, 4, 9)]


def documents(B: int, T: int) -> Tensor:
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids


def make_index_inputs(B: int, T: int, J: int, P: int, dtype: torch.dtype = torch.float32) -> Named:
    """Return q, k, weights of either sign, doc_ids."""
    g = torch.Generator().manual_seed(T)
    shapes = {"q": (B, T, J, P), "k": (B, T, P), "weights": (B, T, J)}
    drawn = {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}
    return drawn | {"doc_ids": documents(B, T)}


def make_inputs(B: int, T: int, Hq: int, Hkv: int, P: int, K: int, dtype: torch.dtype) -> Named:
    """Return q, k, v, a random choice of earlier keys of the same document in random order, and dout."""
    g = torch.Generator().manual_seed(T)
    q, k, v, dout = (
        torch.randn(B, T, H, P, generator=g, dtype=torch.float64).to(dtype) for H in (Hq, Hkv, Hkv, Hq)
    )
    doc_ids = documents(B, T)
    unseen = (doc_ids.unsqueeze(2) != doc_ids.unsqueeze(1)) | torch.ones(T, T, dtype=torch.bool).triu(1)
    chosen = dsa_choice(torch.rand(B, T, T, generator=g).masked_fill(unseen, float("-inf")), K)
    indices = chosen[..., torch.randperm(K, generator=g)].contiguous()
    return {"q": q, "k": k, "v": v, "indices": indices, "dout": dout, "scale": 0.25, "softcap": 0.0}


OP = KernelOp(
    name="dsa_indexer",
    launched=passes(kernel.dsa_attention_fwd_kernel, kernel.dsa_attention_bwd_kernel, "out", "lse"),
    reference=passes(dsa_attention_forward_with_lse, dsa_attention_backward_eager, "out", "lse"),
    make_inputs=make_inputs,
    blocks={(kernel, "_tiles"): lambda *dims: TILES},
    cases=[
        *(Case((1, 22, 3, 1, 16, 18), options) for options in OPTIONS),
        *(Case(sizes, {"softcap": 2.0}) for sizes in SIZES),
        Case((1, 66, 3, 1, 16, 65), {"scale": 0.125, "softcap": 30.0}, dtypes=("fp16",), gpu_blocks=True),
    ],
    faulty=[Case((1, 9, 4, 2, 16, 6), {"softcap": 2.0}, dtypes=("fp16",))],
    faults={
        "softcap": Fault({"softcap": 2.2}),
        "none for key 0": Fault({"indices": lambda chosen: chosen.clamp(min=0)}),
        "a key too few": Fault({"indices": lambda chosen: chosen[..., 1:]}),
        "the choice of another": Fault({"indices": lambda chosen: chosen.roll(1, 1)}),
        "heads": Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
    },
    layouts=[Case((1, 6, 2, 1, 16, 5), {"softcap": 2.0}, dtypes=("fp16",))],
    refused=[Case((1, 2, 1, 1, 48, 2), error=r"power of two up to 128, not 48$")],
    one_key=[Case((2, 1, 2, 1, 16, 1), {"softcap": 2.0})],
    narrow_products=True,
    lse=True,
)
