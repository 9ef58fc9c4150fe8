"""The anchor workload: the time of a train step is divided by its time, so that rows of two hosts compare."""

from __future__ import annotations

import time

import numpy as np


def anchor() -> None:
    """Run a fixed workload independent of torch: small NumPy arrays and interpreter work, about 40 ms of CPU time."""
    for i in range(0, len(_ARRAYS), 2):
        pair = np.concatenate([_ARRAYS[i], _ARRAYS[i + 1]], axis=1).reshape(256, 64)
        mixed = np.tanh(pair @ _WEIGHTS[i % len(_WEIGHTS)])
        sum(k & 7 for k in range(500))
        _ARRAYS[i], _ARRAYS[i + 1] = mixed[:128], mixed[128:]


_GENERATOR = np.random.default_rng(0)
_ARRAYS = [_GENERATOR.standard_normal((128, 64), dtype=np.float32) for _ in range(600)]
_WEIGHTS = [_GENERATOR.standard_normal((64, 64), dtype=np.float32) / 8 for _ in range(52)]


def anchor_milliseconds() -> float:
    """Return the wall time of the fastest of five anchor runs: the current speed of this host."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        anchor()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)
