"""SSD, the chunked scan of Mamba-2 (Dao & Gu 2024)."""

from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_eager
from kernels.ssd_chunk_scan.naive import SsdInputs, ssd_chunk_scan_recurrent, ssd_chunk_scan_step
from kernels.ssd_chunk_scan.op import ssd_chunk_scan

__all__ = [
    "SsdInputs",
    "ssd_chunk_scan",
    "ssd_chunk_scan_eager",
    "ssd_chunk_scan_recurrent",
    "ssd_chunk_scan_step",
]
