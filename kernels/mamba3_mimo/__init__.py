"""The Mamba-3 multi-input multi-output scan (arXiv 2603.15569)."""

from kernels.mamba3_mimo.eager import mamba3_mimo_eager
from kernels.mamba3_mimo.naive import (
    Mamba3MimoInputs,
    Mamba3MimoState,
    mamba3_mimo_recurrent,
    mamba3_mimo_step,
    zero_state,
)
from kernels.mamba3_mimo.op import mamba3_mimo

__all__ = [
    "Mamba3MimoInputs",
    "Mamba3MimoState",
    "mamba3_mimo",
    "mamba3_mimo_eager",
    "mamba3_mimo_recurrent",
    "mamba3_mimo_step",
    "zero_state",
]
