"""Upstream causal_conv1d: the CUDA kernels of the package causal-conv1d (Dao), with the signature of our op."""

from torch import Tensor

from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation causal-conv1d==1.7.0"


def causal_conv1d_upstream(
    x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor, activation: str = "silu"
) -> Tensor:
    """Arguments and result of `causal_conv1d`, on CUDA in fp32, fp16 or bf16; W 2 to 4. Raises ImportError."""
    package = peer("causal_conv1d", "causal_conv1d", INSTALL)
    # The package expects (B,D,T) with channels last (a transposed view) and negative ids for padding.
    y = package.causal_conv1d_fn(
        x.transpose(1, 2),
        weight,
        bias.to(weight.dtype),
        seq_idx=(doc_ids - doc_ids.amin()).contiguous(),
        activation=None if activation == "none" else activation,
    )
    return y.transpose(1, 2)
