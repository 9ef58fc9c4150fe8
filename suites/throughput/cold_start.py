"""One process of the start-up check: import torch, then the first training step of a hybrid with one Mamba block.

`python -m suites.throughput.cold_start DEVICE` with TORCHINDUCTOR_CACHE_DIR set; the last line of output is JSON. On an
empty cache the step compiles all its graphs, on a filled one it loads them.

Objects of the imports are frozen before the step: a full collection of them would count in whichever phase it falls.
"""

from __future__ import annotations

import gc
import json
import sys
import time

# One block keeps a cold start at about 15 CPU seconds, half of them in g++.
MODEL, LAYERS = "nam52", "M"


def main(device: str) -> dict[str, object]:
    """Return seconds of the import and the first step, by phase; peak bytes of memory; losses of two steps.

    compiled, loaded: graphs that AOTAutograd's cache did not have, and had. searches: choices that were benchmarked.
    """
    started = time.process_time()
    import torch

    imported = time.process_time() - started
    from bumpgate.plugin.instruments import cache_counts
    from launch.step import make_optimizer, train_step
    from suites.support.hybrids import token_batch, watched_hybrid
    from suites.support.instruments import autotune_count, compile_phases, cpu_seconds, peak_memory_bytes

    with watched_hybrid(MODEL, "regional", device=device, layer_pattern=LAYERS, depth=len(LAYERS)) as hybrid:
        ids = token_batch(hybrid.config, 2, device=device)
        optimizer = make_optimizer(hybrid.model)
        gc.collect()
        gc.freeze()
        before, start = cpu_seconds(), time.perf_counter()
        with compile_phases() as phases:
            losses = [float(train_step(hybrid.compiled, optimizer, ids))]
        used, wall = cpu_seconds() - before, time.perf_counter() - start
        losses.append(float(train_step(hybrid.compiled, optimizer, ids)))
        counts = cache_counts()
        return {
            "import_cpu_seconds": imported,
            "cpu_seconds": used,
            "wall_seconds": wall,
            "phases": vars(phases),
            "peak_memory_bytes": peak_memory_bytes(),
            "graphs": hybrid.report().unique_graphs,
            "compiled": (counts.aot_miss or 0) + (counts.aot_bypass or 0),
            "loaded": counts.aot_hit or 0,
            "searches": autotune_count(),
            "losses": losses,
            "torch": torch.__version__,
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:2])))
