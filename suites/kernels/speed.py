"""The speed rows of an op: milliseconds, share of the machine's ceilings, and the ratio to its peer in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.ops.spec import Workload
from suites.support.gpu_timing import (
    CALLS,
    copy_rate,
    floor_milliseconds,
    forward_and_backward,
    matmul_rate,
    milliseconds,
)

WAYS = ("forward", "both")
# In one run the 99 % intervals of the medians were at most 1.8 % wide. Two runs hours apart, on different machines,
# differ by at most 0.6 % in eight times and their fractions of the ceiling; one of eight ratios to a peer changed by
# 4.3 %, with the peer's time.
TOLERANCE = {"milliseconds": 0.06, "ratio": 0.08, "fraction": 0.06}
# Most kernels are bound by one of both in part, and the peer of a ratio by the other.
BOUND = "memory, matmul"


class SpeedRows:
    """Callable; see __call__. Holds the `row` fixture of the test that requested it."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def __call__(self, name: str, case: Workload) -> None:
        """Report rows kernels/<name>/{forward,both}_{milliseconds,roofline_fraction,over_peer}.

        both is forward and backward.
        """
        ours = _ways(case.op, case)
        peers = _ways(case.peer, case) if case.peer else {}
        for way, call in ours.items():
            timing = milliseconds(call)
            moved, multiplied = getattr(case.work, f"{way}_bytes"), getattr(case.work, f"{way}_flops")
            about = {"rule": "C37", "bound": BOUND, "seen": CALLS}
            id, limits = f"kernels/{name}/{way}", TOLERANCE
            self._row.timed(f"{id}_milliseconds", timing, "ms", tolerance=limits["milliseconds"], **about)
            self._row.cost(
                f"{id}_roofline_fraction", floor_milliseconds(moved, multiplied) / timing.median, "fraction",
                better="higher", tolerance=limits["fraction"], **about,
                evidence=[f"{moved / 1e6:.0f} MB at {copy_rate() / 1e12:.2f} TB/s, "
                          f"{multiplied / 1e12:.2f} TFLOP at {matmul_rate() / 1e12:.0f} TFLOP/s"],
            )  # fmt: skip
            if peers:
                other = milliseconds(peers[way])
                self._row.cost(
                    f"{id}_over_peer", timing.median / other.median, "ratio", tolerance=limits["ratio"], **about,
                    own=f"{id}_milliseconds", evidence=[f"peer: {other.median:.4f} ms"],
                )  # fmt: skip


def _ways(function: Callable[..., Any], case: Workload) -> dict[str, Callable[[], object]]:
    return dict(zip(WAYS, forward_and_backward(function, case.inputs)))
