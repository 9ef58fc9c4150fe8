"""Upstream mamba3_siso: mamba-ssm's Triton kernels, with the signature of our op."""

from typing import Any

from torch import Tensor

from kernels.mamba3_siso.naive import Mamba3Inputs, Mamba3State
from kernels.op_support import document_borders, peer

INSTALL = "pip install --no-build-isolation mamba-ssm==2.3.2.post1"


def load() -> Any:
    """Import the upstream module. Raises ImportError with the install command."""
    return peer("mamba3_siso", "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined", INSTALL)


def mamba3_siso_upstream(
    i: Mamba3Inputs, state: Mamba3State | None = None, chunk_size: int = 64
) -> tuple[Tensor, Mamba3State]:
    """Arguments and results of `mamba3_siso`, on CUDA; computed in bf16 whatever the inputs.

    Rows with several documents are passed as one varlen sequence, which accepts no initial state. Reads doc_ids
    on the host. Raises ImportError if mamba-ssm is not installed, ValueError on documents together with a state.
    """
    package = load()
    B, T = i.doc_ids.shape
    starts, borders = document_borders(i.doc_ids)
    per_token = [i.q, i.k, i.v, i.adt, i.dt, i.trap, i.angles, i.z]
    if borders is not None:
        if state is not None:
            raise ValueError("mamba3_siso: impl 'upstream' takes no state before rows of several documents")
        per_token = [t.reshape(1, B * T, *t.shape[2:]) for t in per_token]
    q, k, v, adt, dt, trap, angles, z = per_token
    adt, dt, trap = (t.transpose(1, 2).contiguous() for t in (adt.float(), dt.float(), trap))
    y, *final = package.mamba3_siso_combined(
        q, k, v, adt, dt, trap, i.q_bias.float(), i.k_bias.float(), angles, D=i.D, Z=z, Input_States=state,
        chunk_size=chunk_size, return_final_states=True, cu_seqlens=borders,
    )  # fmt: skip
    if borders is not None:
        # One state per document; the final state of a row is its last document's.
        last = starts.sum(1).cumsum(0) - 1
        y, final = y.reshape(B, T, *y.shape[2:]), [t[last] for t in final]
    return y, Mamba3State(*final)
