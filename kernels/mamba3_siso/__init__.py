"""The Mamba-3 single-input single-output scan (arXiv 2603.15569)."""

from kernels.mamba3_siso.eager import mamba3_siso_eager
from kernels.mamba3_siso.naive import (
    Mamba3Inputs,
    Mamba3State,
    mamba3_siso_recurrent,
    mamba3_siso_step,
    zero_state,
)
from kernels.mamba3_siso.op import mamba3_siso

__all__ = [
    "Mamba3Inputs",
    "Mamba3State",
    "mamba3_siso",
    "mamba3_siso_eager",
    "mamba3_siso_recurrent",
    "mamba3_siso_step",
    "zero_state",
]
