"""Run one kernel wheel on one shape of the model: `python -m suites.wheels.smoke CASE/B`, B the batch size.

A wheel built for another torch may import, and even compute some shapes correctly. So the cases are the model's own
(suites/ops), each in a new process, forward and backward. Exits with 1 and one line if the result is
wrong; if the kernel crashes, the exit code is the crash's. The last line of a right result proves that it was computed.
"""

from __future__ import annotations

import sys

from bumpgate.process.child import token
from suites.kernels.model_shapes import ratios_of
from suites.kernels.peer_tuning import tuned_case
from suites.ops import timed_cases
from suites.support.gpu_memory import claimed
from suites.support.reduce import largest

# As in suites/kernels/test_peers.py: a peer rounds more than the plain formula; this only detects a wrong function.
FACTOR = 20.0


def error_ratios(name: str, B: int) -> list[float]:
    """Compare the peer's outputs and gradients with fp64 by the error ratio. Raises KeyError on an unknown name."""
    case = tuned_case(name, B)
    if case.peer is None:
        raise KeyError(name)
    return ratios_of(case, case.peer)[1][0]


def main(argument: str) -> int:
    name, _, batch = argument.partition("/")
    with claimed(timed_cases()[name].oracle_gib):
        worst = largest(error_ratios(name, int(batch)))
    right = worst <= FACTOR
    print(
        f"{argument}: error {worst:.2f} times the plain formula's", file=sys.stdout if right else sys.stderr
    )
    if right:
        print(token(argument))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
