"""Cross entropy of each token's logits, with softcap."""

from kernels.cross_entropy.eager import cross_entropy_backward_eager, cross_entropy_eager
from kernels.cross_entropy.op import cross_entropy

__all__ = ["cross_entropy", "cross_entropy_backward_eager", "cross_entropy_eager"]
