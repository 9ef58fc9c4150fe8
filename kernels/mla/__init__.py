"""The attention core of multi-head latent attention: a train form and an absorbed form of one function."""

from kernels.mla.eager import mla_absorbed_eager, mla_backward_eager, mla_eager
from kernels.mla.op import mla, mla_absorbed

__all__ = ["mla", "mla_absorbed", "mla_absorbed_eager", "mla_backward_eager", "mla_eager"]
