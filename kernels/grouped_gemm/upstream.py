"""Upstream grouped_gemm: torch's grouped matmul (CUTLASS on sm_90), with the signature of our op."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_gemm_upstream(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Arguments and result of `grouped_gemm`, except that every row must belong to an expert: on CUDA torch leaves
    other rows uninitialized, and a check would sync the counts. CUDA: bf16, D_in and D_out multiples of 8.

    Raises ImportError if this torch has no grouped_mm.
    """
    if not hasattr(F, "grouped_mm"):
        raise ImportError(
            f"grouped_gemm: impl 'upstream' needs torch.nn.functional.grouped_mm, which torch {torch.__version__} "
            "lacks; install it with: pip install torch==2.11.0"
        )
    return F.grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
