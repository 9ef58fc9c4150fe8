"""Tasks on a Ray cluster, printed as JSON: python -m tests.support.fleet_calls ADDRESS."""

from __future__ import annotations

import json
import os
import sys

from bumpgate.fleet import Cluster, Done, Task


def main(address: str) -> None:
    """Print the nodes that ran six tasks of some lanes, and OMP_NUM_THREADS in a task."""
    cluster = Cluster(address, patience=1)
    found: dict[str, list[str]] = {}
    for name, lane in (("NODE", "mine"), ("NODE", "other"), ("NODE", "none"), ("OMP_NUM_THREADS", "other")):
        results = dict(cluster.run([Task(os.getenv, (name, "unset"), lane)] * 6))
        values = [result.value if isinstance(result, Done) else "lost" for result in results.values()]
        found[f"{name} {lane}"] = sorted(set(values))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
