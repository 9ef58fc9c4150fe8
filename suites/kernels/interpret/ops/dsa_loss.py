"""The interpreted training kernels of dsa_indexer: scores with their gradient, and the target.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import torch

from kernels.dsa_indexer import kernel, kernel_loss
from kernels.dsa_indexer.eager import (
    dsa_chosen_scores_backward_eager,
    dsa_chosen_scores_eager,
    dsa_distribution_eager,
)
from suites.kernels.interpret.kernel_op import Case, Fault, KernelOp, Named, passes
from suites.kernels.interpret.ops.dsa_indexer import OPTIONS, make_index_inputs, make_inputs

# Several blocks at a small T, and several parts of few heads.
TILES = {"gather": (32, 16, 4, 1), "dk": (16, 32, 4, 1)}
BLOCKS = {(kernel_loss, "_tiles"): lambda *dims: TILES, (kernel_loss, "HEADS"): 2}
SIZES = [(2, 22, 3, 16, 18), (1, 5, 2, 4, 9), (1, 1, 1, 8, 1), (1, 9, 17, 16, 4)]
TARGET_SIZES = [(2, 22, 3, 1, 16, 18), (1, 6, 4, 2, 16, 5)]
TARGET_CASES = [Case(sizes, options) for options in OPTIONS for sizes in TARGET_SIZES]


def make_score_inputs(B: int, T: int, J: int, P: int, K: int, dtype: torch.dtype) -> Named:
    """Weights are of either sign; the choice is random, with fewer keys for early queries."""
    q, k, weights, _ = make_index_inputs(B, T, J, P, dtype).values()
    indices = make_inputs(B, T, 1, 1, 4, K, dtype)["indices"]
    dscores = torch.randn(B, T, K, generator=torch.Generator().manual_seed(K))
    return {"q": q, "k": k, "weights": weights, "indices": indices, "dscores": dscores}


OP = KernelOp(
    name="dsa_indexer_scores",
    launched=passes(kernel.dsa_chosen_scores_fwd_kernel, kernel.dsa_chosen_scores_bwd_kernel),
    reference=passes(dsa_chosen_scores_eager, dsa_chosen_scores_backward_eager),
    make_inputs=make_score_inputs,
    blocks=BLOCKS,
    cases=[*map(Case, SIZES), Case((1, 66, 9, 16, 65), dtypes=("fp16",), gpu_blocks=True)],
    faulty=[Case((1, 9, 4, 16, 6), dtypes=("fp16",))],
    faults={
        "none for key 0": Fault({"indices": lambda chosen: chosen.clamp(min=0)}),
        "the choice of another": Fault({"indices": lambda chosen: chosen.roll(1, 1)}),
        "heads": Fault({"weights": lambda weights: weights.flip(2)}, spares=(3,)),
        "no relu": Fault({"q": torch.abs, "k": torch.abs}),
    },
    layouts=[Case((1, 6, 2, 16, 5), dtypes=("fp16",))],
    refused=[Case((1, 2, 1, 48, 2), error=r"index head dim must be a power of two up to 128, not 48$")],
    narrow_products=True,
)
TARGET = KernelOp(
    name="dsa_indexer_target",
    launched=passes(kernel.dsa_distribution_fwd_kernel),
    reference=passes(dsa_distribution_eager),
    make_inputs=make_inputs,
    blocks=BLOCKS,
    cases=TARGET_CASES,
    faulty=TARGET_CASES,
    faults={"keys": Fault({"k": lambda k: k.flip(1)})},
    refused=[Case((1, 2, 1, 1, 48, 2), error=r"power of two up to 128, not 48$")],
    terms=lambda oracle: 1.0,
)
