"""Cross entropy of each token's logits, with softcap."""

from kernels.cross_entropy.op import cross_entropy
from kernels.cross_entropy.reference import cross_entropy_backward_reference, cross_entropy_reference

__all__ = ["cross_entropy", "cross_entropy_backward_reference", "cross_entropy_reference"]
