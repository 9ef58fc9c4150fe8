"""RMS norm with a SiLU gate before or after it."""

from kernels.rms_norm_gated.eager import rms_norm_gated_backward_eager, rms_norm_gated_eager
from kernels.rms_norm_gated.op import rms_norm_gated

__all__ = ["rms_norm_gated", "rms_norm_gated_backward_eager", "rms_norm_gated_eager"]
