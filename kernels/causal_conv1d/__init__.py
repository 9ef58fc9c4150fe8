"""Depthwise causal convolution over packed documents, and its one-token step."""

from kernels.causal_conv1d.eager import causal_conv1d_backward_eager, causal_conv1d_eager, causal_conv1d_step
from kernels.causal_conv1d.op import causal_conv1d

__all__ = ["causal_conv1d", "causal_conv1d_backward_eager", "causal_conv1d_eager", "causal_conv1d_step"]
