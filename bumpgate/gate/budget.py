"""What a session costs, and which tests of one still fit into the time that is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Wall seconds of a process, the maximum over the sessions so far; 0 before the first session.

    mean: of one process, for each of its tests. overhead: of one process outside of its tests: start-up and imports.
    """

    mean: float = 0.0
    overhead: float = 0.0

    def after(self, tests: Sequence[str], seconds: Mapping[str, float], process: float) -> Pace:
        """Return the pace after a session of these tests. seconds: node id -> those of a test, if known.

        process: wall seconds of one process.
        """
        outside = process - sum(seconds.get(test, math.inf) for test in tests)
        return Pace(max(self.mean, process / len(tests)), max(self.overhead, outside))


def fitting(tests: Sequence[str], seconds: Mapping[str, float], left: float, pace: Pace) -> list[str]:
    """Return the tests that one process can run in the `left` seconds, in the order of `tests`: as many as possible.

    The shortest are chosen first. seconds: node id -> those of a test; one without takes the mean. If none has them,
    the mean includes the overhead.
    """
    if left <= 0:
        return []
    left -= pace.overhead if any(test in seconds for test in tests) else 0.0
    chosen = set()
    for test in sorted(tests, key=lambda test: seconds.get(test, pace.mean)):
        left -= seconds.get(test, pace.mean)
        if left < 0:
            break
        chosen.add(test)
    return [test for test in tests if test in chosen]
