"""The attention core of multi-head latent attention: a train form and an absorbed form of one function."""

from kernels.mla.eager import mla_absorbed_reference, mla_backward_reference, mla_reference
from kernels.mla.op import mla, mla_absorbed

__all__ = [
    "mla",
    "mla_absorbed",
    "mla_absorbed_reference",
    "mla_backward_reference",
    "mla_reference",
]
