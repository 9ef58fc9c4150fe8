"""Upstream ssd_chunk_scan: mamba-ssm's Triton kernels (Dao & Gu), with the signature of our op."""

from typing import Any

from torch import Tensor

from kernels.op_support import peer
from kernels.ssd_chunk_scan.naive import SsdInputs

INSTALL = "pip install --no-build-isolation mamba-ssm==2.3.2.post1"


def load() -> Any:
    """Import the upstream module. Raises ImportError with the install command."""
    return peer("ssd_chunk_scan", "mamba_ssm.ops.triton.ssd_combined", INSTALL)


def ssd_chunk_scan_upstream(
    i: SsdInputs, initial_state: Tensor | None = None, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `ssd_chunk_scan`, on CUDA; 128 tokens per chunk is fastest on an H200.

    Raises ImportError if mamba-ssm is not installed.
    """
    package = load()
    # mamba-ssm compares ids only at the ends of chunks, and assumes that the first document has id 0.
    segments = i.doc_ids.new_zeros(i.doc_ids.shape)
    segments[:, 1:] = (i.doc_ids[:, 1:] != i.doc_ids[:, :-1]).cumsum(1)
    return package.mamba_chunk_scan_combined(
        i.x, i.dt, i.A, i.Bmat, i.Cmat, chunk_size,
        D=i.D, initial_states=initial_state, seq_idx=segments, return_final_states=True,
    )  # fmt: skip
