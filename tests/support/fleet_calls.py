"""Functions for a process that has joined a Ray cluster: python -m tests.support.fleet_calls ADDRESS NAME."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from bumpgate.fleet.engine import Done, Task
from bumpgate.fleet.ray_engine import RayEngine


def node_of_each(engine: RayEngine) -> dict[str, list[str]]:
    """Return the nodes that ran six tasks, for some needs."""
    found = {}
    for needs in (("lane_mine", "class_fast"), ("lane_other",), ("lane_none",)):
        results = dict(engine.run([Task(os.getenv, ("NODE",), needs)] * 6))
        found[" ".join(needs)] = [
            result.value if isinstance(result, Done) else "lost" for _, result in sorted(results.items())
        ]
    return found


def threads(engine: RayEngine) -> Any:
    """Return OMP_NUM_THREADS in a task."""
    ((_, result),) = engine.run([Task(os.getenv, ("OMP_NUM_THREADS", "unset"))])
    return result.value if isinstance(result, Done) else result.why


if __name__ == "__main__":
    address, name = sys.argv[1:]
    print(json.dumps(globals()[name](RayEngine(address, patience=1))))
