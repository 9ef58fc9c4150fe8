"""One process of the warm-restart check: compiles and trains a narrow hybrid and prints the cache counts as JSON.

`python -m suites.cache.restart nam12 regional` with TORCHINDUCTOR_CACHE_DIR set; the parent compares two of them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import psutil

from suites.cache.programs import compiled_code
from suites.support.child import print_result

STEPS = 2


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process, its compile workers and every compiler they ran."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def main(name: str, policy: str) -> dict[str, object]:
    """Warm up and run two train steps; return the cache counters, compiled objects, graphs and seconds."""
    from bumpgate.plugin.instruments import cache_counts
    from launch.step import make_optimizer, train_step
    from suites.support.hybrids import token_batch, watched_hybrid
    from suites.support.instruments import autotune_count

    imported = tree_cpu_seconds()
    started = time.perf_counter()
    with watched_hybrid(name, policy) as hybrid:
        ids = token_batch(hybrid.config, 2)
        hybrid.compiled.warm_up(ids)
        optimizer = make_optimizer(hybrid.model)
        losses = [float(train_step(hybrid.compiled, optimizer, ids)) for _ in range(STEPS)]
        counts = asdict(cache_counts())
        return {
            "counts": counts,
            "autotunes": autotune_count(),
            "graphs": hybrid.report().unique_graphs,
            "losses": losses,
            "cpu_seconds": tree_cpu_seconds() - imported,
            "wall_seconds": time.perf_counter() - started,
            "code": compiled_code(),
        }


if __name__ == "__main__":
    print_result(main(*sys.argv[1:3]))
