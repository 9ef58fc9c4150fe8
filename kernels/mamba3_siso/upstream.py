"""Upstream mamba3_siso: mamba-ssm's Triton kernels, with the signature of our op."""

from typing import Any

import torch
from torch import Tensor

from kernels.mamba3_siso.naive import Mamba3State
from kernels.op_support import peer

INSTALL = "pip install --no-build-isolation mamba-ssm==2.3.2.post1"


def load() -> Any:
    """Import the upstream module. Raises ImportError with the install command."""
    return peer("mamba3_siso", "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined", INSTALL)


def mamba3_siso_upstream(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor, k_bias: Tensor,
    angles: Tensor, D: Tensor, z: Tensor, doc_ids: Tensor, state: Mamba3State | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """Arguments and results of `mamba3_siso`, on CUDA; computed in bf16 whatever the inputs.

    Rows with several documents are passed as one varlen sequence, which accepts no initial state. Reads doc_ids
    on the host. Raises ImportError if mamba-ssm is not installed, ValueError on documents together with a state.
    """
    package = load()
    B, T = doc_ids.shape
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    packed = bool(starts[:, 1:].any())
    per_token, borders = [q, k, v, adt, dt, trap, angles, z], None
    if packed:
        if state is not None:
            raise ValueError("mamba3_siso: impl 'upstream' takes no state before rows of several documents")
        borders = torch.cat((starts.flatten().nonzero().flatten(), doc_ids.new_tensor([B * T]))).to(
            torch.int32
        )
        per_token = [t.reshape(1, B * T, *t.shape[2:]) for t in per_token]
    q, k, v, adt, dt, trap, angles, z = per_token
    adt, dt, trap = (t.transpose(1, 2).contiguous() for t in (adt.float(), dt.float(), trap))
    y, *final = package.mamba3_siso_combined(
        q, k, v, adt, dt, trap, q_bias.float(), k_bias.float(), angles, D=D, Z=z, Input_States=state,
        chunk_size=chunk_size, return_final_states=True, cu_seqlens=borders,
    )  # fmt: skip
    if packed:
        # One state per document; the final state of a row is its last document's.
        last = starts.sum(1).cumsum(0) - 1
        y, final = y.reshape(B, T, *y.shape[2:]), [t[last] for t in final]
    return y, Mamba3State(*final)
