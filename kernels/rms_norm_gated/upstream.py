"""Upstream rms_norm_gated: mamba-ssm's Triton kernel (Dao & Gu), with the signature of our op."""

from torch import Tensor

from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation mamba-ssm==2.3.2.post1"


def rms_norm_gated_upstream(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:  # fmt: skip
    """Arguments and result of `rms_norm_gated`, on CUDA. Raises ImportError if mamba-ssm is not installed."""
    package = peer("rms_norm_gated", "mamba_ssm.ops.triton.layernorm_gated", INSTALL)
    return package.rmsnorm_fn(
        x, weight, None, z=gate, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
    )
