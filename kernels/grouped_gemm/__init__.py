"""Each expert's rows times the expert's matrix, with counts that stay on the device."""

from kernels.grouped_gemm.eager import grouped_gemm_backward_eager, grouped_gemm_eager
from kernels.grouped_gemm.op import grouped_gemm

__all__ = ["grouped_gemm", "grouped_gemm_backward_eager", "grouped_gemm_eager"]
