"""Inputs and plain formulas of every op, one module each, shared by its suites, the golden files and the mutants."""

from suites.kernels.inputs import (
    attention,
    causal_conv1d,
    cross_entropy,
    dsa_indexer,
    dsa_loss,
    grouped_gemm,
    m2rnn,
    mamba3_mimo,
    mamba3_siso,
    mla,
    moe_combine,
    moe_dispatch,
    rms_norm_gated,
    ssd_chunk_scan,
)

__all__ = [
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "dsa_indexer",
    "dsa_loss",
    "grouped_gemm",
    "m2rnn",
    "mamba3_mimo",
    "mamba3_siso",
    "mla",
    "moe_combine",
    "moe_dispatch",
    "rms_norm_gated",
    "ssd_chunk_scan",
]
