"""The ceilings of this run: the bytes a copy moves and the FLOP a matrix product computes per second.

They depend on the machine and not on the code under test. If a timed row changes together with them, the GPU is the
likely cause, so timed rows list each as a fraction of its reviewed value (suites/support/gpu_timing.py).
"""

from __future__ import annotations

from suites.support.gpu_timing import ANCHORS, CALLS, COPIED_BYTES, MATMUL_SIZE
from suites.support.lanes import Lane, lanes

# On two machines copies ran at 4.3 TB/s, and products at 769 to 798 TFLOP/s.
TOLERANCE = 0.05
# Impossible on an H200: memory above the datasheet's rate, or more than 132 SMs of 4096 dense bf16 FLOP per clock at
# 1980 MHz. A clock that measures more is broken.
CEILINGS = {"copy_bytes_per_second": 4.8e12, "matmul_flops": 132 * 4096 * 1.98e9}
UNITS = {"copy_bytes_per_second": "bytes/s", "matmul_flops": "FLOP/s"}
WORK = {
    "copy_bytes_per_second": f"{COPIED_BYTES >> 20} MiB, read and written",
    "matmul_flops": f"bf16, {MATMUL_SIZE} cubed, random numbers",
}


@lanes("h200")
def test_anchors(lane: Lane, row, exclusive_machine) -> None:
    for id, anchor in ANCHORS.items():
        rate, metric = anchor(), id.rpartition("/")[2]
        row.timed(
            id,
            rate,
            UNITS[metric],
            better="higher",
            tolerance=TOLERANCE,
            at_most=CEILINGS[metric],
            rule="C37",
            seen=CALLS,
            evidence=[WORK[metric]],
        )
